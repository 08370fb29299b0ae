# 3: 19, 20: throughput and the rest (400 s)
export PYTHONPATH=$PWD/src
b="timeout 90 python3 -m quire bench"; d="--load-format dummy --workload"
for m in "qwen3-8b" "qwen3-8b --quantization fp8 --kv-cache-dtype fp8" "qwen3-8b --quantization int4" "gpt-oss-20b" "qwen3-30b-a3b" "qwen3-30b-a3b --quantization fp8" "deepseek-v2-lite"; do echo "$m"; $b throughput $m $d nano --repeat 1 2>&1 | tail -4; done
for m in "qwen3-8b --quantization fp8" "qwen3-8b --quantization int4" "qwen3-30b-a3b --quantization fp8" "gpt-oss-20b"; do echo "$m"; $b latency $m $d stream1 --repeat 5 2>&1 | tail -5 | head -4; done
$b latency deepseek-v2-lite $d prefill --lengths 8192 --repeat 5 2>&1 | tail -5
