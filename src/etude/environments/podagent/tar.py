"""Plain ustar archives in memory: files, directories and symlinks with mode and mtime.

By hand, since `tarfile` would bring a tenth of the standard library into the image. Owners are not kept: a pod has one user.
"""

import posix

BLOCK = 512


def _octal(value: int, width: int) -> bytes:
    return b"%0*o\0" % (width - 1, value)


def _header(name: str, kind: bytes, size: int, mode: int, mtime: int, link: str) -> bytes:
    raw, prefix = name.encode("utf-8", "surrogateescape"), b""
    if len(raw) > 100:
        cut = raw.find(b"/", len(raw) - 101)
        if cut < 0 or cut > 155:
            raise ValueError("path too long for ustar: " + name)
        prefix, raw = raw[:cut], raw[cut + 1 :]
    target = link.encode("utf-8", "surrogateescape")
    if len(target) > 100:
        raise ValueError("link target too long for ustar: " + name)
    block = bytearray(BLOCK)
    block[: len(raw)] = raw
    block[100:108] = _octal(mode, 8)
    block[108:116] = block[116:124] = _octal(0, 8)
    block[124:136] = _octal(size, 12)
    block[136:148] = _octal(max(0, mtime), 12)
    block[156:157] = kind
    block[157 : 157 + len(target)] = target
    block[257:265] = b"ustar\x0000"
    block[345 : 345 + len(prefix)] = prefix
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pack(names: list[str], root: str, limit: int) -> bytes:
    """Archive of `names` (relative to `root`), directories with all below them. Raises ValueError above `limit` bytes."""
    parts: list[bytes] = []
    total = 0
    todo = list(reversed(names))
    while todo:
        name = todo.pop()
        path = root + "/" + name
        found = posix.lstat(path)
        kind, mtime, mode = found.st_mode & 0o170000, found.st_mtime_ns // 1_000_000_000, found.st_mode & 0o7777
        data = b""
        if kind == 0o100000:
            fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC | posix.O_NONBLOCK)
            try:
                while part := posix.read(fd, 1 << 20):
                    data += part
                    if total + len(data) > limit:
                        raise ValueError(f"archive above {limit} bytes")
            finally:
                posix.close(fd)
            parts += (_header(name, b"0", len(data), mode, mtime, ""), data, b"\0" * (-len(data) % BLOCK))
        elif kind == 0o120000:
            parts.append(_header(name, b"2", 0, mode, mtime, posix.readlink(path)))
        elif kind == 0o040000:
            parts.append(_header(name.rstrip("/") + "/", b"5", 0, mode, mtime, ""))
            below = sorted(posix.listdir(path), reverse=True)
            todo += [entry if name == "." else name.rstrip("/") + "/" + entry for entry in below]
        total += BLOCK + len(data)
        if total > limit:
            raise ValueError(f"archive above {limit} bytes")
    return b"".join(parts) + b"\0" * (2 * BLOCK)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def unpack(data: bytes, root: str) -> list[str]:
    """Writes an archive below `root`; the paths written. Raises ValueError on a damaged one or on a name that leaves `root`."""
    written: list[str] = []
    stamps: list[tuple[str, int, int]] = []
    at = 0
    long_name = ""
    while at + BLOCK <= len(data) and data[at : at + BLOCK].strip(b"\0"):
        block = data[at : at + BLOCK]
        if int(block[148:156].strip(b"\0 "), 8) != sum(block[:148]) + 256 + sum(block[156:]):
            raise ValueError("damaged archive")
        size, mode, mtime = (int(block[a:b].strip(b"\0 ") or b"0", 8) for a, b in ((124, 136), (100, 108), (136, 148)))
        body = data[at + BLOCK : at + BLOCK + size]
        at += BLOCK + (size + BLOCK - 1) // BLOCK * BLOCK
        kind = block[156:157]
        if kind == b"L":
            long_name = _text(body)
            continue
        prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
        name = (long_name or (prefix + "/" if prefix else "") + _text(block[:100])).rstrip("/")
        long_name = ""
        parts = name.split("/")
        if not name or name.startswith("/") or ".." in parts:
            raise ValueError("bad name in archive: " + name)
        path = root
        for part in parts[:-1]:
            path += "/" + part
            try:
                posix.mkdir(path, 0o755)
            except FileExistsError:
                if posix.lstat(path).st_mode & 0o170000 != 0o040000:
                    raise ValueError("bad name in archive: " + name) from None
        path = root + "/" + name
        if kind == b"5":
            try:
                posix.mkdir(path, 0o755)
            except FileExistsError:
                pass
        else:
            try:
                posix.unlink(path)
            except FileNotFoundError:
                pass
            if kind == b"2":
                posix.symlink(_text(block[157:257]), path)
                written.append(name)
                continue
            if kind not in (b"0", b"\0"):
                raise ValueError("unsupported entry in archive: " + name)
            fd = posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o600)
            try:
                view = memoryview(body)
                while view:
                    view = view[posix.write(fd, view) :]
            finally:
                posix.close(fd)
        written.append(name)
        stamps.append((path, mode, mtime))
    for path, mode, mtime in reversed(stamps):  # directories last: writing into them changes their time
        posix.chmod(path, mode)
        posix.utime(path, (mtime, mtime))
    return written
