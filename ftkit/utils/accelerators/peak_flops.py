"""Peak FLOPs of GPUs: the denominator of MFU. docs/cards.md shows the sources."""

TENSOR_CORE_TFLOPS = {
    "B200": 2250.0,
    "GH200 480GB": 989.4,
    "GH200 144G HBM3e": 989.4,
    "H200": 989.4,
    "H200 NVL": 835.0,
    "H100 80GB HBM3": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "A100-SXM4-40GB": 312.0,
    "A100-SXM4-80GB": 312.0,
    "A100-PCIE-40GB": 312.0,
    "A100 80GB PCIe": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 149.7,
    "A10": 125.0,
    "A10G": 70.0,
    "RTX A6000": 154.8,
    "GeForce RTX 5090": 209.5,
    "GeForce RTX 4090": 165.2,
    "GeForce RTX 3090": 71.0,
}
"""Dense products of 16-bit numbers, bfloat16 or float16, added up in float32, by the name that the
driver gives without its maker. In TF32 it is half of that on each of them."""

BEFORE_AMPERE_TFLOPS = {
    "V100-SXM2-16GB": (125.0, 15.7),
    "V100-SXM2-32GB": (125.0, 15.7),
    "V100-PCIE-16GB": (112.0, 14.0),
    "V100-PCIE-32GB": (112.0, 14.0),
    "V100S-PCIE-32GB": (130.0, 16.4),
    "T4": (65.0, 8.1),
}
"""Float16 added up in float32, and float32 itself; they have neither bfloat16 nor TF32."""


def peak_flops(name: str, kind: str, *, tf32: bool = True) -> float | None:
    """Floating-point operations that a GPU can do in a second, for large dense products.

    Args:
        name: as the driver gives it. A MIG instance has another one, and is not known.
        kind: number format of the products: bf16, 16 or 32.
        tf32: whether float32 is rounded to TF32, where the GPU can, as in training.

    Returns:
        None: it is not known.
    """
    model = name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    if model in BEFORE_AMPERE_TFLOPS:
        half, single = BEFORE_AMPERE_TFLOPS[model]
        tflops = {"16": half, "32": single}.get(kind)
    else:
        half_rate = TENSOR_CORE_TFLOPS.get(model)
        if half_rate is None or (kind == "32" and not tf32):
            return None
        tflops = half_rate / 2 if kind == "32" else half_rate
    return None if tflops is None else tflops * 1e12
