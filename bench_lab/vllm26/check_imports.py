"""Whether the packed vLLM imports where there is no GPU: NVML and torch.cuda tell of an H200 that is not there.

    mkdir /tmp/v && tar -xJf pkgs.tar.xz -C /tmp/v
    (a venv of Python 3.12 with torch 2.11.0, transformers 5.17.0, xxhash, prometheus_client, aiohttp, pillow,
     sentencepiece, tiktoken; a libcuda.so.1 whose functions return 100, made as README.md says)
    LD_LIBRARY_PATH=STUB PYTHONPATH=/tmp/v:REPOSITORY/src python check_imports.py REPOSITORY /tmp/v
"""
import importlib, importlib.machinery, importlib.util, json, sys, tempfile, traceback, types
from pathlib import Path

REPOSITORY, PACKED = map(Path, sys.argv[1:3])
MEMORY = types.SimpleNamespace(total=143771 << 20, free=140000 << 20, used=0)

class Nvml(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        vars(module).update(
            nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 1,
            nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetCudaComputeCapability=lambda h: (9, 0),
            nvmlDeviceGetName=lambda h: "NVIDIA H200", nvmlDeviceGetMemoryInfo=lambda h, *a: MEMORY,
            nvmlDeviceGetUUID=lambda h: "GPU-0")

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "vllm.third_party.pynvml":
            file = str(PACKED / "vllm/third_party/pynvml.py")
            return importlib.util.spec_from_file_location(name, file, loader=Nvml(name, file))

def fake_torch():
    import torch
    properties = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132,
        total_memory=MEMORY.total, warp_size=32, gcnArchName="")
    vars(torch.cuda).update(device_count=lambda: 1, get_device_capability=lambda *a: (9, 0),
        is_available=lambda: True, get_device_properties=lambda *a: properties,
        get_device_name=lambda *a: "NVIDIA H200", set_device=lambda *a: None, current_device=lambda *a: 0)
    torch.accelerator.device_count = lambda: 1

MODULES = """vllm._C_stable_libtorch vllm._moe_C_stable_libtorch vllm.vllm_flash_attn._vllm_fa3_C vllm.v1.engine.core
vllm.v1.engine.llm_engine vllm.v1.worker.gpu_worker vllm.v1.worker.gpu_model_runner vllm.v1.worker.gpu.model_runner
vllm.v1.attention.backends.flash_attn vllm.model_executor.models.qwen3
vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector vllm.v1.kv_offload.cpu.spec
vllm.model_executor.model_loader.dummy_loader vllm.v1.executor.uniproc_executor vllm.v1.engine.input_processor
vllm.compilation.backends vllm.compilation.passes.pass_manager vllm.model_executor.warmup.kernel_warmup
vllm.v1.sample.sampler vllm.v1.core.sched.async_scheduler vllm.v1.engine.output_processor quire.connectors.vllm""".split()

def main():
    sys.meta_path.insert(0, Finder)
    fake_torch()
    import torch
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.selector import get_attn_backend
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    import compare_vllm
    with tempfile.TemporaryDirectory() as made:
        folder = compare_vllm.write_shape("qwen3-8b", Path(made) / "qwen3-8b")
        sys.argv[1:] = ["--model", str(folder)]
        args = compare_vllm.parse_args()
        for name in (compare_vllm.PLAIN, compare_vllm.QUIRE, compare_vllm.OFFLOADING):
            settings = compare_vllm.engine_settings(name, args)
            if "kv_transfer_config" in settings:
                settings["kv_transfer_config"] = KVTransferConfig(**settings["kv_transfer_config"])
            config = EngineArgs(**settings).create_engine_config(UsageContext.LLM_CLASS)
            print(name, "| V2 runner", config.use_v2_model_runner, "|", config.compilation_config.cudagraph_mode,
                "| async", config.scheduler_config.async_scheduling)
            if config.kv_transfer_config is not None:
                print(KVConnectorFactory.get_connector_class(config.kv_transfer_config))
            with set_current_vllm_config(config):
                print(get_attn_backend(128, torch.bfloat16, None), "FlashAttention", get_flash_attn_version())
    failed = 0
    for module in MODULES:
        try:
            importlib.import_module(module)
        except BaseException:
            failed += 1
            print("FAILED", module)
            traceback.print_exc(limit=-3)
    print(f"{len(MODULES) - failed} of {len(MODULES)} modules import")
    return failed

if __name__ == "__main__":
    sys.exit(main())
