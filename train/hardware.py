"""What the machine is good at."""

import torch


def has_fast_bf16() -> bool:
    """True where bfloat16 products are native: a CUDA device that supports it, or a CPU with AVX512-BF16 or AMX."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def resolve_precision(precision: str) -> str:
    """Lightning's `precision` for the setting `precision`; "auto" asks the hardware."""
    if precision != "auto":
        return precision
    return "bf16-mixed" if has_fast_bf16() else "32-true"
