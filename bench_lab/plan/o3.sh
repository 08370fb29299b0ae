# 19, 20: throughput, about 300 s
export PYTHONPATH=$PWD/src
b="timeout 80 python3 -m quire bench"; d="--load-format dummy --workload"
for m in "qwen3-8b" "qwen3-8b --quantization fp8 --kv-cache-dtype fp8" "qwen3-8b --quantization int4" "gpt-oss-20b" "qwen3-30b-a3b --quantization fp8"; do echo "$m"; $b throughput $m $d nano --repeat 1 2>&1 | tail -4; done
$b latency gpt-oss-20b $d stream1 --repeat 5 2>&1 | tail -5 | head -4
$b latency deepseek-v2-lite $d prefill --lengths 8192 --repeat 5 2>&1 | tail -5
