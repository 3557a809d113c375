"""The driver's library (NVML) for simulated cards, in the place of the module pynvml."""

from types import ModuleType, SimpleNamespace

from simulated_card.kinds import KINDS, Kind
from simulated_card.settings import Cards


class NVMLError(Exception):
    """As pynvml's."""

    def __init__(self, value: int = 999) -> None:
        super().__init__(value)
        self.value = value


class NVMLError_NotSupported(NVMLError):
    """As pynvml's."""


class NVMLError_NotFound(NVMLError):
    """As pynvml's."""


class NVMLError_InvalidArgument(NVMLError):
    """As pynvml's."""


def module(cards: Cards) -> ModuleType:
    """The functions that ftkit, torch and DeepSpeed call. The driver lists whole cards, whatever
    CUDA_VISIBLE_DEVICES says; slices of one come second."""
    whole: list[tuple[Kind, str, list[int]]] = []
    for index, name in enumerate(cards.kinds):
        kind = KINDS[name]
        if kind.parent is None:
            whole.append((kind, cards.uuid(index), []))
        elif whole and whole[-1][2]:
            whole[-1][2].append(index)  # another slice of the same card
        else:
            uuid = cards.uuid(index).replace("MIG-", "GPU-")
            whole.append((KINDS[kind.parent], uuid, [index]))

    def handle(index: int) -> SimpleNamespace:
        if not 0 <= index < len(whole):
            raise NVMLError_InvalidArgument
        kind, uuid, slices = whole[index]
        return SimpleNamespace(kind=kind, uuid=uuid, slices=slices, index=index)

    def slice_of(card: SimpleNamespace, index: int) -> SimpleNamespace:
        if index >= len(card.slices):
            raise NVMLError_NotFound
        own = card.slices[index]
        return SimpleNamespace(
            kind=KINDS[cards.kinds[own]], uuid=cards.uuid(own), slices=[], index=index
        )

    def by_uuid(uuid: str | bytes) -> SimpleNamespace:
        text = uuid.decode() if isinstance(uuid, bytes) else uuid
        found = [handle(i) for i in range(len(whole))]
        found += [slice_of(card, i) for card in found for i in range(len(card.slices))]
        for card in found:
            if card.uuid == text:
                return card
        raise NVMLError_NotFound

    def memory(card: SimpleNamespace, *_: object) -> SimpleNamespace:
        total = cards.memory_bytes or card.kind.memory_bytes
        return SimpleNamespace(total=total, free=total - 2**29, used=2**29)

    def utilization(card: SimpleNamespace) -> SimpleNamespace:
        if card.slices or card.kind.parent:
            raise NVMLError_NotSupported
        return SimpleNamespace(gpu=50, memory=10)

    def power(card: SimpleNamespace) -> int:
        if card.slices or card.kind.parent:
            raise NVMLError_NotSupported
        return 250_000

    def mig_mode(card: SimpleNamespace) -> list[int]:
        if card.kind.capability < (8, 0):
            raise NVMLError_NotSupported
        return [int(bool(card.slices))] * 2

    major, minor = (int(part) for part in cards.cuda.split("."))
    found = ModuleType("pynvml")
    found.__dict__.update(
        NVMLError=NVMLError,
        NVMLError_NotSupported=NVMLError_NotSupported,
        NVMLError_NotFound=NVMLError_NotFound,
        NVMLError_InvalidArgument=NVMLError_InvalidArgument,
        NVMLError_DriverNotLoaded=NVMLError,
        NVMLError_LibraryNotFound=NVMLError,
        nvmlInit=lambda: None,
        nvmlInitWithFlags=lambda flags: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(whole),
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetName=lambda card: card.kind.name,
        nvmlDeviceGetUUID=lambda card: card.uuid,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetUtilizationRates=utilization,
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetCudaComputeCapability=lambda card: card.kind.capability,
        nvmlDeviceGetMigMode=mig_mode,
        nvmlDeviceGetMaxMigDeviceCount=lambda card: 7 if card.slices else 0,
        nvmlDeviceGetMigDeviceHandleByIndex=slice_of,
        nvmlSystemGetDriverVersion=lambda: cards.driver,
        nvmlSystemGetCudaDriverVersion=lambda: major * 1000 + minor * 10,
        nvmlSystemGetCudaDriverVersion_v2=lambda: major * 1000 + minor * 10,
    )
    return found
