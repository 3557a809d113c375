"""The cache of tokenised samples: files under addresses that follow from all that decides them.

An entry is a directory `ADDRESS/SPLIT` with the arrays of the samples, which are mapped into memory
and so shared by all processes of a machine, the records to ask questions of, and `entry.json` with
a checksum of every file and of itself; what is damaged is found when it is opened.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from filelock import FileLock, Timeout

from ftkit.data.prepare import Counts, Prepared, make_renderer
from ftkit.data.records.keys import UnusedKeys
from ftkit.data.records.media import MEDIA_KINDS, with_files
from ftkit.data.records.record import Record
from ftkit.data.records.shape_rows import PREFERENCES, RECORD_SHAPES
from ftkit.data.samples.sample_set import SampleArrays, SampleSet
from ftkit.data.spec import Content, Part, Rules
from ftkit.models.chat_templates.prompt_styles import AnyStyle
from ftkit.models.pretrained.model_files import PROCESSOR_FILES
from ftkit.utils.damaged_files import require_regular
from ftkit.utils.files import cache_root, new_directory, write_json
from ftkit.utils.json_values import from_json
from ftkit.utils.registry import extension_names, imported

if TYPE_CHECKING:
    from ftkit.models.pretrained.tokenizer import Tokenizer

# Raised when the files of an entry change: entries that are older then have other addresses.
_CACHE_FORMAT = 5
_LIBRARIES = ("sentencepiece", "tokenizers")
"""Libraries that make texts and tokens: another version may make others."""
_CODE = ("data", "models/chat_templates", "models/pretrained/tokenizer.py")
"""Modules of ftkit that do so, beside the extensions that bring kinds of records."""
_ENTRY, _RECORDS = "entry.json", "records.jsonl"
_STAMPS = "media_stamps"
"""File with the stamps of files of media. It is written again where these were copied, and has no
checksum: without it they are read."""
# Little-endian, whatever the machine: the directory may be shared.
_ARRAYS = {
    "tokens": "<i4",
    "offsets": "<i8",
    "spans": "<i4",
    "span_offsets": "<i8",
    "weights": "<f4",
    "targets": "<f4",
    "media": "<i4",
    "media_offsets": "<i8",
    "media_files": "u1",
}
"""Type of numbers in each file of the samples. Those of weights, labels and media may be absent."""
_RECORD_OFFSETS, _WHOLE_LENGTHS = "record_offsets", "whole_lengths"
# Bytes. hashlib and pread release the GIL, so that threads hash pieces at the same time.
_PIECE_BYTES = 8 * 2**20
_REPORT_INTERVAL_S = 0.5

_OnWaiting = Callable[[str, int, int], None]
"""Called with split, records done and records in all, of the process that is waited for."""


class DamagedEntry(Exception):
    """An entry differs from what was written; the message says where."""


class OutdatedEntry(Exception):
    """A file of media no longer holds what it held; the message names it."""


def cache_directory() -> Path:
    """Return the directory of the cache of tokenised samples."""
    return cache_root() / "samples"


def file_digest(path: Path) -> str:
    """Checksum of a file: SHA-256 over the hashes of its pieces, which all cores compute.

    Raises:
        OSError: it cannot be read.
        UserError: it is a pipe, a device or a directory.
    """
    require_regular(path)
    with path.open("rb") as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size

        def of_piece(start: int) -> bytes:
            return hashlib.sha256(os.pread(descriptor, _PIECE_BYTES, start)).digest()

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            pieces = b"".join(pool.map(of_piece, range(0, size, _PIECE_BYTES)))
    return hashlib.sha256(pieces).hexdigest()


def rendering_of(part: Part, tokenizer: "Tokenizer") -> str:
    """Describe the rendering of a part as text: where it differs, samples differ."""
    style, values = part.rules.prompt_style, _plain(part.rules)
    values |= {"shape": part.shape, "prompt_style": style and _style_texts(style)}
    if part.rules.chat_template is not None:
        template = make_renderer(part, tokenizer).template
        values |= {"template": template.source, "special_tokens": dict(template.special_tokens)}
        values |= {"stops": tokenizer.stops}
    if part.media:
        values |= {"media": make_renderer(part, tokenizer).media_settings}
    return json.dumps(values, sort_keys=True)


def _plain(rules: Rules) -> dict[str, Any]:
    """The rules as JSON values, without the prompt style."""
    names = (field.name for field in dataclasses.fields(rules))
    return {name: getattr(rules, name) for name in names if name != "prompt_style"}


def _style_texts(style: AnyStyle) -> list[str]:
    """Render marks in a prompt style, after its stop tokens, to tell styles apart."""
    # Control characters stand for the texts: no prompt style holds them.
    marks: list[dict[str, str]] = [{}, {"input": "\2"}, {"sys_prompt": "\3"}]
    return [*style.stops, *(style.apply(prompt="\1", **mark) for mark in marks)]


def directory_of(content: Content) -> str:
    """Return the common directory of the files of a part."""
    return os.path.commonpath([file.parent for files in content.files() for file in files])


def address_of_content(content: Content, tokenizer: "Tokenizer", max_seq_length: int) -> str:
    """The address of a part that follows from files and options.

    Raises:
        OSError: a file cannot be read.
    """
    groups, above = content.files(), directory_of(content)
    # Paths below the common directory: data that are moved or copied keep their address.
    files = [
        [(os.path.relpath(file, above), file_digest(file)) for file in files] for files in groups
    ]
    return address_of({"files": files, "options": content.options}, tokenizer, max_seq_length)


def address_of_records(part: Part, tokenizer: "Tokenizer", max_seq_length: int) -> str:
    """The address of a part of which nothing but its records is known."""
    digests = []
    for records in (part.train, part.val):
        digest = hashlib.sha256()
        for record in records:
            digest.update(json.dumps(record, sort_keys=True).encode())
        digests.append(digest.hexdigest())
    rendering = rendering_of(part, tokenizer)
    return address_of({"records": digests, "rendering": rendering}, tokenizer, max_seq_length)


def address_of(values: Mapping[str, Any], tokenizer: "Tokenizer", max_seq_length: int) -> str:
    """The address of what is tokenised of something.

    Args:
        values: what it is, as JSON values.
        tokenizer: of the base model.
        max_seq_length: no sample has more tokens; 0: nothing is cut.
    """
    every = {
        **values,
        "format": _CACHE_FORMAT,
        "code": _code_digest(),
        "versions": [version(library) for library in _LIBRARIES],
        "tokenizer": _tokenizer_digest(tokenizer),
        "media": _media_settings(tokenizer.directory),
        "max_seq_length": max_seq_length,
    }
    text = json.dumps(every, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _media_settings(directory: Path) -> dict[str, Any]:
    """What of a base model decides how media become tokens: models of one tokenizer differ in it.

    A model without settings of a processor is given no media, so nothing is imported for these.
    """
    if not any((directory / name).is_file() for name in PROCESSOR_FILES):
        return {}
    return {kind.name: imported(kind.settings_place)(directory) for kind in MEDIA_KINDS}


@functools.cache
def _code_digest() -> str:
    """Digest of the modules and templates of ftkit that make samples of files."""
    digest = hashlib.sha256()
    brought = (
        f"extensions/{one}"
        for one in extension_names()
        if any(rows.of_extension(one) for rows in (RECORD_SHAPES, PREFERENCES, MEDIA_KINDS))
    )
    for name in (*_CODE, *brought):
        path = Path(__file__).parents[1] / name
        for file in sorted(path.rglob("*.*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".jinja"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _tokenizer_digest(tokenizer: "Tokenizer") -> str:
    """Digest of a tokenizer, independent of where its files lie."""
    processor = tokenizer.processor
    ends = [tokenizer.use_bos, tokenizer.bos_id, tokenizer.eos_id, type(tokenizer).__module__]
    # The only setting that the library does not write.
    ends.append(processor.encode_special_tokens)
    return hashlib.sha256(processor.to_str().encode() + repr(ends).encode()).hexdigest()


class _StoredRecords(Sequence[Record]):
    """Records in a mapped file, each parsed when it is accessed."""

    def __init__(self, text: Any, offsets: Any, folder: str) -> None:
        """Describe the file; folder: in which relative paths of media begin."""
        self._text, self._offsets, self._folder = text, offsets, folder

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        text = self._text[self._offsets[place] : self._offsets[place + 1]]
        return _with_folder(json.loads(text.tobytes()), self._folder)


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """A split of a part, as it is kept."""

    prepared: Prepared
    part: Part
    """Without its records."""
    rendering: str
    """Description of what rendered them; see `rendering_of`."""


class SampleCache:
    """Entries by address and split."""

    def __init__(self, directory: Path) -> None:
        """Open a cache; its directory is made with the first entry."""
        self._directory = directory

    def find(
        self,
        address: str,
        split: str,
        name: str,
        prompt_style: Callable[[], AnyStyle | None],
        folder: str,
    ) -> CacheEntry | None:
        """Return an entry, or None if there is none.

        Args:
            address: of the part.
            split: of it.
            name: of the part.
            prompt_style: the one of its rules, if they have one.
            folder: of its files, where relative paths of media begin; "": it has none.

        Raises:
            DamagedEntry: there is one, but it is not as it was written.
            OutdatedEntry: there is one, but of a file of media that has changed since.
        """
        directory = self._directory / address / split
        if not directory.is_dir():
            return None
        try:
            values, prepared = _open(directory, folder)
            part = _part(values, name, prompt_style() if values["has_prompt_style"] else None)
            rendering = str(values["rendering"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedEntry(f"{directory}: {error}") from error
        _check_media(directory, prepared.samples)
        return CacheEntry(prepared=prepared, part=part, rendering=rendering)

    def keep(
        self, address: str, split: str, entry: CacheEntry, folder: str, read_at_ns: int
    ) -> Prepared:
        """Write or replace an entry, and return its samples as mapped from the files.

        Args:
            address: of the part.
            split: of it.
            entry: what is kept.
            folder: as of `find`.
            read_at_ns: when its records began to be read.

        Raises:
            OSError: it cannot be written.
        """
        directory = self._directory / address / split
        # Written beside its place and renamed: an entry is whole or not there.
        with new_directory(directory, overwrite=True) as partial:
            # Records are kept of validation alone, where an evaluation prompts with them.
            _write(partial, entry, folder, read_at_ns, with_records=split != "train")
        return _open(directory, folder)[1]

    @contextlib.contextmanager
    def building(self, address: str, on_waiting: _OnWaiting) -> Iterator["Building"]:
        """Hold the lock of an address: one process makes its entries while the others wait.

        Raises:
            OSError: the cache cannot be written.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        progress_file = self._directory / f"{address}.progress"
        lock = FileLock(self._directory / f"{address}.lock")
        while True:
            try:
                # The wait is interrupted twice a second, to report how far the other process is.
                lock.acquire(timeout=_REPORT_INTERVAL_S)
                break
            except Timeout:
                with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                    state = json.loads(progress_file.read_text(encoding="utf-8"))
                    on_waiting(state["split"], state["done"], state["total"])
        try:
            yield Building(progress_file)
        finally:
            with contextlib.suppress(OSError):
                progress_file.unlink(missing_ok=True)
            lock.release()


class Building:
    """Progress of making entries, for the processes that wait for them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._reported_at = 0.0

    def report(self, split: str, done: int, total: int) -> None:
        """Write the progress for waiting processes, twice a second at most."""
        if time.monotonic() - self._reported_at > _REPORT_INTERVAL_S:
            self._reported_at = time.monotonic()
            with contextlib.suppress(OSError):
                write_json(self._file, {"split": split, "done": done, "total": total})


def _write(
    directory: Path, entry: CacheEntry, folder: str, read_at_ns: int, *, with_records: bool
) -> None:
    prepared, part = entry.prepared, entry.part
    arrays = prepared.samples.arrays._asdict()
    if files := prepared.samples.media_files:
        from ftkit.data.media_files import stamps_of

        _write_stamps(directory, stamps_of(files, read_at_ns))
        below = [
            one._replace(file=os.path.relpath(one.file, folder)) if one.is_relative else one
            for one in files
        ]
        arrays["media_files"] = np.frombuffer(json.dumps(below).encode(), dtype=np.uint8)
    names = [name for name in _ARRAYS if arrays[name] is not None]
    for name in names:
        (directory / name).write_bytes(np.ascontiguousarray(arrays[name], dtype=_ARRAYS[name]).data)
    lengths = np.ascontiguousarray(prepared.whole_lengths, dtype="<i4")
    (directory / _WHOLE_LENGTHS).write_bytes(lengths.data)
    names.append(_WHOLE_LENGTHS)
    if with_records:
        names += [_RECORDS, _RECORD_OFFSETS]
        _write_records(directory, [_without_folder(one, folder) for one in prepared.records])
    values = {
        "shape": part.shape,
        "description": part.description,
        "unused": dataclasses.asdict(part.unused),
        "media": part.media,
        "rules": _plain(part.rules),
        "has_prompt_style": part.rules.prompt_style is not None,
        "rendering": entry.rendering,
        "counts": dataclasses.asdict(prepared.counts),
        "sufficient_length": prepared.sufficient_length,
        "examples": prepared.examples,
        "kept": _each_kept(prepared.kept, _without_folder, folder),
        "per_sample": prepared.samples.per_sample,
        "fingerprint": prepared.samples.fingerprint,
        "files": {name: file_digest(directory / name) for name in names},
    }
    text = json.dumps({"values": values, "checksum": _checksum(values)}, indent=1)
    (directory / _ENTRY).write_text(text, encoding="utf-8")


def _write_records(directory: Path, records: Sequence[Record]) -> None:
    offsets = [0]
    with (directory / _RECORDS).open("wb") as file:
        for record in records:
            file.write(json.dumps(record).encode() + b"\n")
            offsets.append(file.tell())
    (directory / _RECORD_OFFSETS).write_bytes(np.array(offsets, dtype="<i8").data)


def _part(values: Mapping[str, Any], name: str, style: AnyStyle | None) -> Part:
    """The part of an entry, without its records."""
    return Part(
        name=name,
        description=values["description"],
        shape=values["shape"],
        unused=UnusedKeys(names=tuple(values["unused"]["names"]), more=values["unused"]["more"]),
        rules=Rules(**values["rules"], prompt_style=style),
        train=(),
        val=(),
        media=tuple(values["media"]),
    )


def _without_folder(record: Record, folder: str) -> Record:
    """A record whose relative paths begin in a folder."""
    return with_files(record, lambda file: os.path.relpath(file, folder))


def _with_folder(record: Record, folder: str) -> Record:
    return with_files(record, lambda file: str(Path(folder, file)))


def _each_kept(
    kept: Mapping[str, list[Record]], change: Callable[[Record, str], Record], folder: str
) -> dict[str, list[Record]]:
    return {reason: [change(one, folder) for one in records] for reason, records in kept.items()}


def _write_stamps(directory: Path, stamps: Any) -> None:
    partial = directory / f"{_STAMPS}.{os.getpid()}"
    partial.write_bytes(np.ascontiguousarray(stamps, dtype="<i8").data)
    partial.replace(directory / _STAMPS)


def _check_media(directory: Path, samples: SampleSet) -> None:
    """Refuse an entry of which a file of media has changed."""
    if not (files := samples.media_files):
        return
    from ftkit.data.media_files import first_changed

    stamps = None
    with contextlib.suppress(OSError, ValueError):
        stamps = np.fromfile(directory / _STAMPS, dtype="<i8").reshape(-1, 2)
    changed, now = first_changed(files, stamps)
    if changed is not None:
        raise OutdatedEntry(changed.file)
    if stamps is None or not np.array_equal(stamps, now):
        # Only what the next run need not read: the cache may be read-only.
        with contextlib.suppress(OSError):
            _write_stamps(directory, now)


def _open(directory: Path, folder: str) -> tuple[dict[str, Any], Prepared]:
    """Read an entry: what it says of itself, and its samples."""
    entry = json.loads((directory / _ENTRY).read_text(encoding="utf-8"))
    values = entry["values"]
    if entry["checksum"] != _checksum(values):
        raise ValueError(f"{_ENTRY} does not match its checksum")
    for name, digest in values["files"].items():
        # Checked at every opening, which costs seconds for gigabytes: a flipped bit would be
        # trained on.
        if file_digest(directory / name) != digest:
            raise ValueError(f"{name} does not match its checksum")
    arrays = SampleArrays(
        **{
            name: _mapped(directory / name, dtype)
            for name, dtype in _ARRAYS.items()
            if name in values["files"]
        }
    )
    media = None if arrays.media is None else arrays.media.reshape(-1, 4)
    targets = arrays.targets
    if targets is not None:
        targets = targets.reshape(len(arrays.offsets) - 1, -1)
    samples = SampleSet(
        *arrays._replace(spans=arrays.spans.reshape(-1, 2), media=media, targets=targets),
        per_sample=values["per_sample"],
        fingerprint=values["fingerprint"],
        media_folder=folder,
    )
    records: Sequence[Record] = ()
    if _RECORDS in values["files"]:
        offsets = _mapped(directory / _RECORD_OFFSETS, "<i8")
        records = _StoredRecords(_mapped(directory / _RECORDS, "u1"), offsets, folder)
    prepared = Prepared(
        samples=samples,
        records=records,
        counts=from_json(Counts, values["counts"]),
        sufficient_length=values["sufficient_length"],
        whole_lengths=_mapped(directory / _WHOLE_LENGTHS, "<i4"),
        examples=values["examples"],
        kept=_each_kept(values["kept"], _with_folder, folder),
    )
    return values, prepared


def _mapped(path: Path, dtype: str) -> Any:
    """Map the numbers of a file into memory, copy-on-write."""
    with path.open("rb") as file:
        # mmap refuses empty files.
        if not os.fstat(file.fileno()).st_size:
            return np.empty(0, dtype=dtype)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=dtype)


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
