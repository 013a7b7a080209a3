"""Read rate of a GPU's own memory: measured, told by clock and bus width, or from the maker's data sheet by the GPU's name."""

import re

from ..inventory import Gpu
from ..inventory.links import pcie_gb_s
from ..inventory.measure import memory_ceiling_gb_s

# GB/s as NVIDIA's data sheets and product pages state them. Where several boards bear a name the fastest one stands here, since these bound from above.
DATASHEET_GB_S = {
    r"\bB200\b": 8000, r"\bH200\b": 4800, r"\bH20\b": 4000, r"\bH100 NVL\b": 3938, r"\bH100\b": 3352, r"\bH800\b": 3352, r"\bGH200\b": 4900,
    r"\bA100\b": 2039, r"\bA800\b": 2039, r"\bA30\b": 933, r"\bA40\b": 696, r"\bA10\b": 600, r"\bL40S?\b": 864, r"\bL4\b": 300, r"\bL20\b": 864,
    r"\bCMP 170HX\b": 1493, r"\bV100\b": 1134, r"\bP100\b": 732, r"\bP40\b": 346, r"\bT4\b": 320,
    r"RTX PRO 6000": 1792, r"RTX 6000 Ada": 960, r"RTX A6000": 768, r"RTX A5000": 768, r"RTX A4000": 448, r"Quadro RTX 8000": 672, r"Quadro RTX 6000": 672,
    r"RTX 5090": 1792, r"RTX 5080": 960, r"RTX 4090": 1008, r"RTX 4080": 736, r"RTX 3090 Ti": 1008, r"RTX 3090": 936, r"RTX 3080 Ti": 912, r"RTX 3080": 912,
    r"RTX 2080 Ti": 616, r"TITAN RTX": 672, r"TITAN V": 653,
}  # fmt: skip


# Dense 16-bit tensor operations, 10^12 a second, as NVIDIA's data sheets state them without sparsity, at the higher rate where accumulation has two.
# Boards that the maker lists no such rate for (mining cards) bear that of the full chip: a bound.
DATASHEET_TFLOPS = {
    r"\bB200\b": 2500, r"\bH200\b": 990, r"\bH20\b": 148, r"\bH100\b": 990, r"\bH800\b": 990, r"\bGH200\b": 990, r"\bA100\b": 312, r"\bA800\b": 312,
    r"\bA30\b": 165, r"\bA40\b": 150, r"\bA10\b": 125, r"\bL40S\b": 362, r"\bL40\b": 181, r"\bL4\b": 121, r"\bL20\b": 120, r"\bCMP 170HX\b": 312,
    r"\bV100\b": 130, r"\bT4\b": 65, r"RTX PRO 6000": 504, r"RTX 6000 Ada": 364, r"RTX A6000": 155, r"RTX A5000": 111, r"RTX A4000": 77,
    r"RTX 5090": 419, r"RTX 5080": 225, r"RTX 4090": 330, r"RTX 4080": 209, r"RTX 3090 Ti": 160, r"RTX 3090": 142, r"RTX 3080": 136, r"RTX 2080 Ti": 108,
}  # fmt: skip

# Newest PCIe generation of GPUs by major and minor compute capability; all have boards with 16 lanes.
PCIE_GENERATION = {"6.0": 3, "6.1": 3, "7.0": 3, "7.5": 3, "8.0": 4, "8.6": 4, "8.9": 4, "9.0": 5, "10.0": 5, "10.3": 6, "12.0": 5}


def pcie_at_most_gb_s(gpu: Gpu) -> tuple[float | None, str]:
    """(GB/s, source) that a GPU of this kind has on its best board and slot: a bound where its own link is not told."""
    generation = PCIE_GENERATION.get(gpu.compute_capability or "")
    return (pcie_gb_s(generation, 16), f"PCIe Gen{generation} x16 is the most of sm_{gpu.compute_capability.replace('.', '')}") if generation else (None, "")


def memory_gb_s(gpu: Gpu) -> tuple[float | None, str]:
    """(GB/s, where it comes from): memory clock and bus width as the driver tells them, else the data sheet; (None, '') for a GPU that is in neither."""
    rate, source = memory_ceiling_gb_s(gpu)
    if rate:
        return rate, source or ""
    for pattern, listed in DATASHEET_GB_S.items():
        if gpu.name and re.search(pattern, gpu.name):
            return float(listed), f"data sheet of {gpu.name}"
    return None, ""


def tensor_tflops(gpu: Gpu) -> float | None:
    """Dense 16-bit tensor operations in 10^12 a second by the data sheet of the GPU's name; None for a GPU that is not listed."""
    return next((float(rate) for pattern, rate in DATASHEET_TFLOPS.items() if gpu.name and re.search(pattern, gpu.name)), None)
