"""NVIDIA GPUs to compile for, on a machine without GPU, driver and CUDA.

XLA's compiler for GPUs gets the description of a GPU as text. It is in the wheel `jax-cuda12-pjrt`
and needs `ptxas` and a library of LLVM, which are in the wheel `nvidia-cuda-nvcc-cu12`. Nothing is
tuned on a GPU: products are computed in the default way of each compiler.
"""

from __future__ import annotations

from pathlib import Path
import sys
from typing import Any, NamedTuple


class Gpu(NamedTuple):
  """Facts of NVIDIA's data sheets and programming guide."""

  name: str
  capability: tuple[int, int]
  cores: int  # multiprocessors
  units: int  # of float32 in each
  ghz: float
  gb_per_s: int
  cache_mib: int  # L2
  memory_gb: float
  shared_kib: int  # of a multiprocessor; a block can have 1 KiB less
  threads: int  # of a multiprocessor
  exact_tflops: float  # products in float32
  tf32_tflops: float | None  # products with inputs rounded to TF32; None = it has no such units
  half_tflops: float  # products of bfloat16, or of float16 where there is no bfloat16


GPUS = {
  "h100": Gpu(
    "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 3352, 50, 84.9, 228, 2048, 67, 494, 989
  ),
  "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 4800, 50, 141, 228, 2048, 67, 494, 989),
  "a100": Gpu(
    "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 2039, 40, 85.1, 164, 2048, 19.5, 156, 312
  ),
  "v100": Gpu(
    "Tesla V100-SXM2-16GB", (7, 0), 80, 64, 1.53, 898, 6, 16.9, 97, 2048, 15.7, None, 125
  ),
  "t4": Gpu("Tesla T4", (7, 5), 40, 64, 1.59, 320, 4, 15.8, 65, 1024, 8.1, None, 65),
}
_FLAGS = (
  "--xla_gpu_autotune_level=0",
  "--xla_gpu_collect_cost_model_stats=true",
  # This pass knows Hopper and newer alone, and fails for every other GPU.
  "--xla_disable_hlo_passes=sol-gpu-cost-model-stats-collection",
)


def environment(variables: dict[str, str]) -> dict[str, str]:
  """Variables with which a process can compile for GPUs; jax reads them when it is imported."""
  flags = [variables.get("XLA_FLAGS", ""), *_FLAGS]
  changes = {"JAX_PLATFORMS": "cpu"}
  for folder in (Path(place, "nvidia", "cuda_nvcc") for place in sys.path):
    if (folder / "bin" / "ptxas").exists():
      flags.append(f"--xla_gpu_cuda_data_dir={folder}")
      changes["PATH"] = f"{folder / 'bin'}:{variables['PATH']}"
      break
  return variables | changes | {"XLA_FLAGS": " ".join(flags).strip()}


def devices(target: str, count: int) -> tuple[Any, ...]:
  """`count` GPUs of a name of `GPUS` to compile for."""
  from jax.experimental import topologies

  return tuple(
    topologies.get_topology_desc(
      platform="cuda", target_config=_description(GPUS[target]), topology=f"1x1x{count}"
    ).devices
  )


def _description(gpu: Gpu) -> str:
  """XLA's `GpuTargetConfigProto` as text; limits are those of every GPU since Volta."""
  major, minor = gpu.capability
  feature = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
  return f"""
gpu_device_info {{
  core_count: {gpu.cores} fpus_per_core: {gpu.units} clock_rate_ghz: {gpu.ghz}
  memory_bandwidth: {gpu.gb_per_s * 10**9} device_memory_size: {int(gpu.memory_gb * 1e9)}
  l2_cache_size: {gpu.cache_mib << 20}
  shared_memory_per_block: {48 << 10} shared_memory_per_core: {gpu.shared_kib << 10}
  shared_memory_per_block_optin: {(gpu.shared_kib - 1) << 10}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {gpu.threads}
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  device_address_bits: 64 driver_version: "12.9.0" runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{gpu.name}"
"""
