"""Damage to files: one seeded change per call, suited to the format of the file."""

import copy
import io
import json
import os
import pickletools
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Tree = Any
"""Values as JSON has them."""

_EXTREMES: tuple[Tree, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 10**9, 10**18, 10**30, -(10**30)),
    *(
        0.5,
        -1.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "../x",
        "/etc/passwd",
        "\0",
        "é\ud800",
    ),
    *("9" * 6000, "x" * 100_000, [], {}, [[]], {"x": 1}, [0] * 50_000, ["x"], {"": None}),
)
_NOT_REGULAR = 0.03
"""Fraction of mutations that put something else in the place of the file."""


def mutate(path: Path, rng: random.Random, *, numbers_are_verified: bool = True) -> str:
    """Damage a file; return a description of the damage.

    Args:
        path: the file.
        rng: draws the damage.
        numbers_are_verified: whether there are checksums of the numbers in a safetensors file;
            else only its header is damaged, since other numbers make another sound file.
    """
    if rng.random() < _NOT_REGULAR:
        return _replace(path, rng)
    content = path.read_bytes()
    change = _change_for(path, content)
    header_only = path.suffix == ".safetensors" and not numbers_are_verified
    if change is not None and (rng.random() < 0.7 or header_only):
        try:
            changed, what = change(content, rng)
        except (ValueError, IndexError, UnicodeError):  # such as a safetensors file without tensors
            pass
        else:
            path.write_bytes(changed)
            return what
    changed, what = _change_bytes(content, rng)
    path.write_bytes(changed)
    return what


def _change_for(
    path: Path, content: bytes
) -> Callable[[bytes, random.Random], tuple[bytes, str]] | None:
    """Choose the mutation for the format of a file; None: only its bytes can be changed."""
    if content.startswith(b"PK"):
        return _change_torch_zip
    if path.name == ".metadata":
        return _change_pickle
    return {
        ".json": _change_json,
        ".yaml": _change_yaml,
        ".jsonl": _change_line,
        ".safetensors": _change_safetensors,
        ".gguf": _change_gguf,
        ".jinja": _change_template,
        **dict.fromkeys((".png", ".jpg", ".webp", ".gif"), _change_image),
    }.get(path.suffix)


def _replace(path: Path, rng: random.Random) -> str:
    path.unlink()
    kind = rng.choice(("fifo", "/dev/zero", "directory", "empty", "missing"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "/dev/zero":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    return f"the file is {kind}"


def _change_bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    size = max(len(content), 1)
    # Most often in the beginning: headers determine how the rest is read.
    start = rng.randrange(min(size, 4096) if rng.random() < 0.6 else size)
    length = rng.choice((1, 2, 8, 64, 512))
    end = start + length
    match rng.randrange(8):
        case 0:
            return content[:start], f"cut at byte {start}"
        case 1:
            flipped = bytes(b ^ (1 << rng.randrange(8)) for b in content[start : start + 1])
            return content[:start] + flipped + content[start + 1 :], f"bit flipped at {start}"
        case 2:
            noise = rng.randbytes(length)
            return content[:start] + noise + content[end:], f"{length} bytes of noise at {start}"
        case 3:
            return content[:start] + content[end:], f"{length} bytes missing at {start}"
        case 4:
            doubled = content[start:end]
            return content[:end] + doubled + content[end:], f"{length} bytes doubled at {start}"
        case 5:
            return content + rng.randbytes(length), f"{length} bytes appended"
        case 6:
            other = rng.randrange(size)
            low, high = sorted((start, other))
            length = min(length, high - low, size - high)
            a, b = content[low : low + length], content[high : high + length]
            swapped = (
                content[:low] + b + content[low + length : high] + a + content[high + length :]
            )
            return swapped, f"{length} bytes swapped between {low} and {high}"
        case _:
            numbers = list(re.finditer(rb"\d+", content))
            if not numbers:
                return content[::-1], "reversed"
            found = rng.choice(numbers)
            value = rng.choice((b"-1", b"1" + b"0" * 18, b"9" * 5000, b"1e999", b"0"))
            return content[: found.start()] + value + content[found.end() :], (
                f"number at {found.start()} becomes {value[:20].decode()}"
            )


def _change_tree(tree: Tree, rng: random.Random) -> tuple[Tree, str]:
    """Change, remove, duplicate or nest one value of a tree."""
    tree = copy.deepcopy(tree)
    places: list[tuple[Any, Any]] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        keys = node if isinstance(node, dict) else range(len(node))
        # Long lists, such as vocabularies, must not hide the keys around them.
        chosen = rng.sample(list(keys), min(len(keys), 40))
        for key in chosen:
            places.append((node, key))
            if isinstance(node[key], dict | list):
                pending.append(node[key])
    if not places:
        return rng.choice(_EXTREMES), "replaced"
    node, key = rng.choice(places)
    value = node[key]
    match rng.randrange(8):
        case 0:
            del node[key]
            return tree, f"{key!r} left out"
        case 1:
            other, name = rng.choice(places)
            node[key] = copy.deepcopy(other[name])
            return tree, f"{key!r} takes the value of {name!r}"
        case 2:
            node[key] = [value]
            return tree, f"{key!r} nested in a list"
        case 3 if isinstance(node, list):
            node.insert(key, copy.deepcopy(value))
            return tree, f"item {key} doubled"
        case 4 if isinstance(value, int | float) and not isinstance(value, bool):
            node[key] = rng.choice((-value, value * 10**9, value + 1, str(value), float(value)))
        case _:
            node[key] = copy.deepcopy(rng.choice(_EXTREMES))
    return tree, f"{key!r} becomes {repr(node[key])[:40]}"


def _change_json(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    if rng.random() < 0.03:
        depth = rng.choice((1000, 100_000))
        return b"[" * depth, f"{depth} brackets"
    tree, what = _change_tree(json.loads(content), rng)
    return json.dumps(tree).encode(), what


_YAML_BOMBS = (
    b"a0: &a0 {x: 1}\n"
    + b"".join(b"a%d: &a%d [*a%d, *a%d, *a%d]\n" % (i, i, *[i - 1] * 3) for i in range(1, 40)),
    b"a0: &a0 {x: 1}\n"
    + b"".join(
        b"a%d: &a%d {<<: [%s]}\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9))
        for i in range(1, 12)
    ),
    b"train: &t\n  epochs: *t\n",
    b"seed: !!int foo\n",
    b"quiet: !!bool foo\n",
    b"seed: " + b"9" * 5000 + b"\n",
    b"a: " + b"[" * 20_000 + b"\n",
)


def _change_yaml(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    if rng.random() < 0.1:
        return content + rng.choice(_YAML_BOMBS), "YAML that expands"
    tree, what = _change_tree(yaml.safe_load(content), rng)
    text: str = yaml.safe_dump(tree, sort_keys=False)
    return text.encode("utf-8", "surrogatepass"), what


def _change_line(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    lines = content.splitlines()
    place = rng.randrange(len(lines))
    lines[place], what = _change_json(lines[place], rng)
    return b"\n".join(lines) + b"\n", f"line {place + 1}: {what}"


def _change_safetensors(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    (length,) = struct.unpack("<Q", content[:8])
    if rng.random() < 0.1:
        length = rng.choice((0, 2**40, 2**63, length - 1))
        return struct.pack("<Q", length) + content[8:], f"header of {length} bytes"
    header, what = _change_tree(json.loads(content[8 : 8 + length]), rng)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :], f"header: {what}"


def _change_gguf(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Replace one number of the header by an extreme one, where counts and sizes are."""
    place = rng.choice((8, 16, 24 + 8 * rng.randrange(200)))
    value = rng.choice((0, 1, 2**31, 2**40, 2**63 - 1, 2**64 - 1, 80 * 2**20))
    return content[:place] + struct.pack("<Q", value) + content[place + 8 :], (
        f"64 bits at {place} become {value}"
    )


_TEMPLATE_PIECES = (
    "{{ ('x ' * 4000000) | wordwrap(1) }}",
    "{{ 10 ** 1000 // 3 ** 500 }}{% for i in range(100000) %}{{ (7 ** 1400) // 3 }}{% endfor %}",
    "{{ ('1' * 4000000) | int(0, 16) }}",
    "{{ " + "9" * 100_000 + " }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ messages | tojson | wordwrap(1) | wordwrap(1) | indent(9999) }}",
    "{{ '%99999999d' % 1 }}",
    "{{ 'a'.__class__.__mro__ }}",
    "{{ raise_exception(messages) }}",
    "{{ messages[0].content.x.y }}",
    "{% set n = namespace(a=[]) %}{% set n.a = [n] %}{{ n.a }}",
    "{{ 1 / 0 }}",
    "{{ (" * 500 + "1" + ")" * 500 + " }}",
    "{% generation %}{{ messages }}{% endgeneration %}",
    "{{ bos_token }}",
)


def _change_template(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    text = content.decode()
    places = [m.start() for m in re.finditer(r"\{[{%]", text)]
    place = rng.choice([0, len(text), *places])
    piece = rng.choice(_TEMPLATE_PIECES)
    return (text[:place] + piece + text[place:]).encode(), f"{piece[:40]} at {place}"


_SIDES = (0, 1, 2, 255, 8193, 60_000, 2**16 - 1)
_OTHER_FORMATS = (b"%!PS-Adobe-3.0 EPSF-3.0\n", b"II*\0", b"BM", b"<svg>", b"\0\0\0\x18ftypavif")


def _change_image(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Promise another size in the header of an image, or another format."""
    if rng.random() < 0.1:
        head = rng.choice(_OTHER_FORMATS)
        return head + content[len(head) :], f"it begins with {head!r}"
    width, height = (rng.choice(_SIDES) for _ in range(2))
    what = f"{width} x {height} in the header"
    if content.startswith(b"\x89PNG"):
        # Of width, height, and what says how pixels are stored; the checksum is right again.
        kind = content[24:29] if rng.random() < 0.7 else rng.randbytes(5)
        head = b"IHDR" + struct.pack(">II", width * rng.choice((1, 2**15)), height) + kind
        return content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:], what
    if content.startswith(b"GIF"):
        return content[:6] + struct.pack("<HH", width, height) + content[10:], what
    if content.startswith(b"RIFF"):
        return content[:26] + struct.pack("<HH", width, height) + content[30:], what
    frame = content.index(b"\xff\xc0")
    return content[: frame + 5] + struct.pack(">HH", height, width) + content[frame + 9 :], what


def _change_torch_zip(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change a value of the pickle in a file of torch.save, or compress its members."""
    source = zipfile.ZipFile(io.BytesIO(content))
    compresses = rng.random() < 0.05
    out = io.BytesIO()
    what = "compressed" if compresses else ""
    with zipfile.ZipFile(out, "w") as target:
        for member in source.infolist():
            data = source.read(member)
            if member.filename.endswith("data.pkl") and not compresses:
                data, what = _change_pickle(data, rng)
            kind = zipfile.ZIP_DEFLATED if compresses else zipfile.ZIP_STORED
            target.writestr(zipfile.ZipInfo(member.filename), data, kind)
    if not what:
        raise ValueError("no pickle in it")
    return out.getvalue(), what


_VALUE_OPERATIONS = (
    *("BININT", "LONG", "BINUNICODE", "SHORT_BINUNICODE", "BINFLOAT", "NONE", "NEWTRUE"),
    *("NEWFALSE", "EMPTY_DICT", "EMPTY_TUPLE", "BINGET"),
)


def _change_pickle(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change one number, text or reference of a pickle, without unpickling it."""
    ops = [(op.name, argument, place or 0) for op, argument, place in pickletools.genops(data)]
    ends = [place for _, _, place in ops[1:]] + [len(data)]
    changeable = [
        (*operation, end)
        for operation, end in zip(ops, ends, strict=True)
        if operation[0].startswith(_VALUE_OPERATIONS)
    ]
    name, argument, start, end = rng.choice(changeable)
    if name == "BINGET":
        new, value = b"h" + bytes([rng.randrange(256)]), "another object"
    else:
        extreme = rng.choice(_EXTREMES)
        if isinstance(argument, int) and rng.random() < 0.5:
            extreme = rng.choice((-argument, argument + 1, argument * 2, argument * 10**9))
        new, value = _pickled(extreme), repr(extreme)[:40]
    changed = data[:start] + new + data[end:]
    # The lengths of frames would no longer be right; a pickle without frames is valid.
    frames = [place for name, _, place in ops if name == "FRAME"]
    for frame in reversed(frames):
        place = frame if frame < start else frame + len(new) - (end - start)
        changed = changed[:place] + changed[place + 9 :]
    return changed, f"pickle: {repr(argument)[:40]} at {start} becomes {value}"


def _pickled(value: Tree) -> bytes:
    """The operations that put a value on the stack of an unpickler."""
    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            size = value.bit_length() // 8 + 1
            return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            text = value.encode("utf-8", "surrogatepass")
            return b"X" + struct.pack("<I", len(text)) + text
        case list():
            return b"]" if len(value) > 100 else b"](" + b"".join(map(_pickled, value)) + b"e"
        case dict():
            return b"}"
    raise TypeError(value)
