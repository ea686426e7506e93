"""The header of a file that `torch.save` wrote (pytorch_model.bin), checked: names, types, shapes and where the data of
each tensor lies. Nothing is unpickled: see `allspan.protos.model_files.torch_pickle`.

Such a file is a ZIP archive (APPNOTE.TXT, PKWARE) of stored records under one folder: data.pkl, a record data/KEY for
each storage, byteorder and version. Read here directly, so that what is checked is what is read: sizes come from the
archive's directory, and each record must begin where its own header says so.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.json_values import shown
from allspan.protos.model_files.limits import MAX_TENSORS, MAX_TENSORS_HEADER_BYTES
from allspan.protos.model_files.regular_file import open_regular
from allspan.protos.model_files.safetensors_header import BITS, StoredTensor
from allspan.protos.model_files.tensor_ranges import check_ranges
from allspan.protos.model_files.torch_pickle import PickledTensor, pickled_tensors

_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_PLACE_OF_END_64 = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_RECORD = struct.Struct("<4s5H3I2H")
_OLD_MAGICS = (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46", b"\x80\x02")
_ENCRYPTED = 1
_FULL = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Record:
    """`offset` and `num_bytes` of a record's data, from the start of the file."""

    offset: int
    num_bytes: int


def read_torch_header(path: Path) -> dict[str, StoredTensor]:
    """Name → tensor. Raises CheckpointError naming the file, the tensor and what is wrong."""
    with open_regular(path) as file:
        return torch_header(file, path)


def torch_header(file: BinaryIO, path: Path) -> dict[str, StoredTensor]:
    """See `read_torch_header`; `file` is open, at its start."""
    file_bytes = os.fstat(file.fileno()).st_size
    start = file.read(8)
    if start.startswith(b"version "):
        raise CheckpointError(f"{path}: is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
    if start.startswith(_OLD_MAGICS):
        raise CheckpointError(
            f"{path}: a pickle as PyTorch before 1.6 wrote it, which is not read: load it where it comes from and save "
            "its tensors with safetensors.torch.save_file"
        )
    if not start.startswith(b"PK\x03\x04"):
        raise CheckpointError(f"{path}: not a file of torch.save: it does not begin as a ZIP archive")
    records = _records(file, file_bytes, path)
    folder = _folder(records, path)
    order = records.get(f"{folder}/byteorder")
    if order is not None and (found := _read(file, order, 16, path)) != b"little":
        raise CheckpointError(f"{path}: byteorder is {shown(found)}, must be little: save it on another machine")
    pickle = _read(file, records[f"{folder}/data.pkl"], MAX_TENSORS_HEADER_BYTES, path)
    tensors = pickled_tensors(pickle, f"{path}: data.pkl")
    return {name: _stored(path, name, each, records, folder) for name, each in tensors.items()}


def _stored(path: Path, name: str, tensor: PickledTensor, records: dict[str, _Record], folder: str) -> StoredTensor:
    storage, record = tensor.storage, records.get(f"{folder}/data/{tensor.storage.key}")
    if record is None:
        raise CheckpointError(f"{path}: tensor {shown(name)} lies in record {shown(storage.key)}, which is missing")
    size = BITS[storage.dtype] // 8
    if record.num_bytes != storage.count * size:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} lies in record {shown(storage.key)} of {record.num_bytes} bytes, must have "
            f"{storage.count * size} ({storage.count} elements of {storage.dtype})"
        )
    num_bytes = math.prod(tensor.shape) * size
    return StoredTensor(storage.dtype, tensor.shape, record.offset + tensor.first * size, num_bytes)


def _folder(records: dict[str, _Record], path: Path) -> str:
    """The folder that the archive's names begin with."""
    found = [name.removesuffix("/data.pkl") for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(found) != 1:
        raise CheckpointError(f"{path}: not a file of torch.save: {len(found)} records are NAME/data.pkl, must be 1")
    return found[0]


def _records(file: BinaryIO, file_bytes: int, path: Path) -> dict[str, _Record]:
    """Every record by name, as the archive's directory says, and its data where the record's own header puts it."""
    count, length, begin, end = _directory(file, file_bytes, path)
    file.seek(begin)
    directory, at = file.read(length), 0
    records: dict[str, _Record] = {}
    ranges = [(begin, end, "the directory")]
    for _ in range(count):
        name, (offset, num_bytes), at = _entry(directory, at, path)
        if name in records:
            raise CheckpointError(f"{path}: record {shown(name)} is there twice")
        if offset > file_bytes:
            raise CheckpointError(
                f"{path}: truncated: record {shown(name)} begins at byte {offset}, but the file has {file_bytes} bytes"
            )
        file.seek(offset)
        found = file.read(_RECORD.size)
        fields = _RECORD.unpack(found) if len(found) == _RECORD.size else (b"",) * 11
        if fields[0] != b"PK\x03\x04" or file.read(fields[9]) != name.encode():
            raise CheckpointError(f"{path}: record {shown(name)} does not begin at byte {offset}, where it should")
        data = offset + _RECORD.size + fields[9] + fields[10]
        ranges.append((offset, data + num_bytes, name))
        records[name] = _Record(data, num_bytes)
    if at != length:
        raise CheckpointError(f"{path}: the directory of the archive has {length} bytes, its {count} entries {at}")
    check_ranges(str(path), ranges, file_bytes)
    return records


def _directory(file: BinaryIO, file_bytes: int, path: Path) -> tuple[int, int, int, int]:
    """Entries, bytes and beginning of the archive's directory, and the end of the archive."""
    truncated = CheckpointError(f"{path}: truncated: its {file_bytes} bytes do not end as a ZIP archive does")
    at = file_bytes - _END.size
    if at < 0:
        raise truncated
    file.seek(at)
    magic, *_, count, length, begin, comment = _END.unpack(file.read(_END.size))
    if magic != b"PK\x05\x06" or comment:
        raise truncated
    if count == 0xFFFF or _FULL in (length, begin):
        file.seek(max(0, at - _PLACE_OF_END_64.size))
        magic, _, place, _ = _PLACE_OF_END_64.unpack(file.read(_PLACE_OF_END_64.size))
        if magic != b"PK\x06\x07" or place > at - _END_64.size:
            raise truncated
        file.seek(place)
        magic, *_, count, length, begin = _END_64.unpack(file.read(_END_64.size))
        if magic != b"PK\x06\x06":
            raise truncated
    if count > 2 * MAX_TENSORS or length > MAX_TENSORS_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: an archive of {count} records whose directory has {length} bytes, must have at most "
            f"{2 * MAX_TENSORS} and {MAX_TENSORS_HEADER_BYTES}: save it in several files"
        )
    if begin + length > at:
        raise truncated
    return count, length, begin, file_bytes


def _entry(directory: bytes, at: int, path: Path) -> tuple[str, tuple[int, int], int]:
    """A record's name, the place of its header and the bytes of its data; and where the next entry begins."""
    fields = _ENTRY.unpack_from(directory, at) if at + _ENTRY.size <= len(directory) else (b"",)
    if fields[0] != b"PK\x01\x02":
        raise CheckpointError(f"{path}: the directory of the archive ends at byte {at} of {len(directory)}")
    _, _, _, flags, method, _, _, _, packed, size, name_bytes, extra_bytes, comment_bytes, *_, offset = fields
    begin = at + _ENTRY.size
    name_end, extra_end = begin + name_bytes, begin + name_bytes + extra_bytes
    try:
        name = directory[begin:name_end].decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: the name of a record is not UTF-8") from error
    if method or flags & _ENCRYPTED:
        raise CheckpointError(f"{path}: record {shown(name)} is compressed or encrypted, which torch.save never does")
    size, packed, offset = _long_values(directory[name_end:extra_end], [size, packed, offset], name, path)
    if size != packed:
        raise CheckpointError(f"{path}: record {shown(name)} has {size} bytes and takes {packed}, must be the same")
    return name, (offset, size), extra_end + comment_bytes


def _long_values(extra: bytes, values: list[int], name: str, path: Path) -> list[int]:
    """The values with those that did not fit 32 bits taken from the entry's extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        body, at = extra[at + 4 : at + 4 + length], at + 4 + length
        if kind == 1:
            held = iter(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
            values = [next(held, _FULL) if value == _FULL else value for value in values]
    if _FULL in values:
        raise CheckpointError(f"{path}: record {shown(name)} does not say how long it is and where it lies")
    return values


def _read(file: BinaryIO, record: _Record, most: int, path: Path) -> bytes:
    if record.num_bytes > most:
        raise CheckpointError(f"{path}: a record of {record.num_bytes} bytes, must have at most {most}")
    file.seek(record.offset)
    return file.read(record.num_bytes)
