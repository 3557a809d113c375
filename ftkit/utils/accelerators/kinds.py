"""Kinds of devices: a table of their differences, and peak FLOPs of GPUs; no torch.

What torch knows of every kind comes from `torch.accelerator` where it is needed. All else is in
this table: another kind of device is another row.
"""

from dataclasses import dataclass

from ftkit.utils.registry import Registry

HOST_KIND, USUAL_KIND = "cpu", "cuda"
"""The kind that every machine has, and the one that is assumed where none is named."""


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """Properties of a kind of device. The defaults hold for kinds without a row."""

    name: str
    """Name in `torch.device`: cpu, cuda, xpu, mps, ..."""
    noun: str = "device"
    """Word for one device in messages."""
    tried: bool = False
    """True if ftkit was tested on it, at least on simulated devices."""
    communication: str | None = None
    """The backend of torch.distributed that takes its tensors; None: ranks cannot communicate."""
    strategies: tuple[str, ...] | None = ("single",)
    """Strategies that run on it."""
    counts_memory: bool = False
    """True if torch.accelerator counts its memory in bytes: allocated, requested and reserved."""
    allocator_block_bytes: int = 1
    """The allocator rounds sizes up to a multiple of it."""
    grows_segments: bool = False
    """True if its allocator takes the setting `expandable_segments`."""
    times_events: bool = False
    """True if its events have times, needed because calls return before their kernels run."""
    computes_late: bool = False
    """True if it only begins to compute when a number is read: parts of a step cannot be timed
    without waiting. What it compiles for that is counted."""
    compiles_shapes: bool = False
    """True if it compiles what it computes anew for each shape: micro-batches have few of them."""
    pins_host_memory: bool = False
    """True if copies from page-locked host memory run asynchronously."""
    registers_host_memory: bool = False
    """True if ordinary host memory can be page-locked, by cudaHostRegister."""
    pages_optimizer_state: bool = False
    """True if bitsandbytes' paged optimizers keep their state in memory that the driver moves to
    the host."""
    nvml_tells_use: bool = False
    """True if NVML reports how busy it is."""
    has_float64: bool = True
    """True if it computes in float64, in which losses are summed."""
    has_flash: bool = False
    """True if torch's flash attention over variable lengths runs on it, in 16 bits."""
    has_triton: bool = False
    """True if the kernels of Liger run on it."""
    computes_bf16: bool = False
    """True if every device of it computes in bfloat16; else a device is asked, by trying."""
    has_float16: bool = True
    """False if float16 cannot be trained on it."""
    rounds_float32: bool = False
    """True if it multiplies float32 in bfloat16, unless the highest precision is asked for."""
    has_few_bits: bool = True
    """False if weights and optimizer state of 4 or 8 bits are refused on it: bitsandbytes has no
    kernels for it, and nobody has tried torchao's."""
    enough_tokens: int | None = None
    """Tokens of a micro-batch from which on more of them bring no speed worth their memory; None:
    not known, and micro-batches of a recipe that says nothing of them have one sequence."""
    unpredicted_memory: str = ""
    """Memory that predictions leave out. Empty: they count what CUDA takes beside tensors."""
    package: str | None = None
    """The package that brings it to torch, out of torch's tree: see `backends`."""
    answers_within_s: float | None = None
    """A query for it that takes longer, in seconds, means that there is none. None: no limit."""
    rehearsed_on: str = ""
    """What ran instead of such a device, where no device has run ftkit."""


DEVICE_KINDS = Registry(
    "device_kinds",
    (DeviceKind,),
    core=(
        DeviceKind(
            name=HOST_KIND,
            noun="CPU",
            tried=True,
            communication="gloo",
            strategies=None,
            # The quick start on two AVX2 cores: 3,980, 6,230, 7,800 and 8,300 tokens/s with 256,
            # 512, 1,024 and 2,048; a larger model gains less.
            enough_tokens=2048,
        ),
        # GPUs of NVIDIA; those of AMD too, in builds of torch for ROCm, where they have this name.
        DeviceKind(
            name=USUAL_KIND,
            noun="GPU",
            tried=True,
            communication="nccl",
            strategies=None,
            counts_memory=True,
            allocator_block_bytes=512,  # kMinBlockSize in c10/cuda/CUDACachingAllocator.h
            grows_segments=True,
            times_events=True,
            pins_host_memory=True,
            registers_host_memory=True,
            pages_optimizer_state=True,
            nvml_tells_use=True,
            has_flash=True,
            has_triton=True,
            # On an H200 a step of 1,064 tokens takes as long as launching its kernels, and one of
            # 4,096 is bound by the card (docs/performance.md); twice that is for newer ones.
            enough_tokens=8192,
        ),
        # GPUs of Intel.
        DeviceKind(
            name="xpu",
            noun="GPU",
            communication="xccl",
            strategies=("single", "ddp", "fsdp"),
            counts_memory=True,
            allocator_block_bytes=512,  # kMinBlockSize in c10/xpu/XPUCachingAllocator.cpp
            times_events=True,
            pins_host_memory=True,
        ),
        # GPUs of Apple: one in a machine, with the memory of the host, which torch.accelerator
        # counts from torch 2.13 on at the earliest (https://github.com/pytorch/pytorch/pull/186748).
        DeviceKind(name="mps", noun="GPU", has_float64=False),
        # TPUs of Google, one chip. Where there is none, the import of torch_tpu may take 13 s
        # (0.2.0), and its first use waits for minutes: a refusal takes less than 15 s in all.
        DeviceKind(
            name="tpu",
            noun="TPU",
            computes_bf16=True,
            has_float16=False,
            rounds_float32=True,
            has_few_bits=False,
            computes_late=True,
            compiles_shapes=True,
            unpredicted_memory="its programs and the padding of its layouts, which are not known",
            package="torch_tpu",
            answers_within_s=14,
            rehearsed_on="TorchTPU over XLA's CPU client",
        ),
    ),
)


def device_kind(name: str) -> DeviceKind:
    """Properties of a kind of device; a kind without a row has the defaults."""
    return DEVICE_KINDS.get(name) or DeviceKind(name=name)


def kind_of_backend(backend: str) -> str:
    """The kind whose tensors a backend of torch.distributed takes.

    One that takes those of several kinds takes those of the host.
    """
    return next((kind.name for kind in DEVICE_KINDS if kind.communication == backend), HOST_KIND)


# From the makers' data sheets, without sparsity. By exact name: a card of a similar name has
# another peak, and no MFU is better than a wrong one.
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
"""TFLOPs of dense products of 16-bit numbers (bfloat16 or float16) accumulated in float32, by the
driver's name of the GPU without its maker. In TF32 each of them reaches half."""

TPU_TFLOPS = {"TPU v5e": 197.0, "TPU v5p": 459.0, "TPU v6e": 918.0}
"""TFLOPs of dense products in bfloat16 of a chip, by torch_tpu's name of it. From Google's pages
about each (cloud.google.com/tpu/docs/v5e, ...), that of a v5p by way of torch_tpu's own table.
Those in float32 are not published, and a v7 shows torch two devices, whose share is not known."""

BEFORE_AMPERE_TFLOPS = {
    "V100-SXM2-16GB": (125.0, 15.7),
    "V100-SXM2-32GB": (125.0, 15.7),
    "V100-PCIE-16GB": (112.0, 14.0),
    "V100-PCIE-32GB": (112.0, 14.0),
    "V100S-PCIE-32GB": (130.0, 16.4),
    "T4": (65.0, 8.1),
}
"""TFLOPs in float16 accumulated in float32, and in float32; they lack bfloat16 and TF32."""


def peak_flops(name: str, kind: str, *, tf32: bool = True) -> float | None:
    """Peak floating-point operations per second of a GPU, for large dense products.

    Args:
        name: as the driver gives it. A MIG instance has another name, and is not known.
        kind: number format of the products: bf16, 16 or 32.
        tf32: whether float32 is rounded to TF32, where the GPU can, as in training.

    Returns:
        Operations per second; None: not known.
    """
    if name in TPU_TFLOPS:
        return TPU_TFLOPS[name] * 1e12 if kind == "bf16" else None
    # Drivers name these cards "Tesla V100-SXM2-16GB" and "Tesla T4".
    model = name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    if model in BEFORE_AMPERE_TFLOPS:
        half, single = BEFORE_AMPERE_TFLOPS[model]
        tflops = {"16": half, "32": single}.get(kind)
    else:
        half_rate = TENSOR_CORE_TFLOPS.get(model)
        # Data sheets give float32 of the ordinary cores, which large products in torch hardly
        # reach.
        if half_rate is None or (kind == "32" and not tf32):
            return None
        tflops = half_rate / 2 if kind == "32" else half_rate
    return None if tflops is None else tflops * 1e12
