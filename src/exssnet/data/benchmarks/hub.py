"""Find the parquet files of a hub data set: in a local mirror, or downloaded once and verified."""

from __future__ import annotations

import hashlib
import json
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from exssnet.errors import DataError, ParseError
from exssnet.io import parse
from exssnet.io.disk import cache_folder

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling


def parquet_files(hub_id: str, split: str, config: str | None = None) -> list[Path]:
    """Find the files `<split>-*.parquet` of a data set, sorted.

    A data set in the mirror `EXSSNET_DATA` is used without network access.
    """
    mirror = os.environ.get("EXSSNET_DATA")
    if mirror:
        folder = Path(mirror).expanduser() / hub_id
        if folder.is_dir():
            return _in_folder(folder, split, config)
    receipt = cache_folder() / "hub" / hub_id / f"{config or 'all'}-{split}.json"
    return _received(receipt) or _download(hub_id, split, config, receipt)


def _in_folder(folder: Path, split: str, config: str | None) -> list[Path]:
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*.parquet")]
    files = [folder / name for name in sorted(names) if _belongs(name, split, config)]
    if not files:
        raise DataError(
            f"no {split}-*.parquet in {folder}{f' for {config}' if config else ''}: "
            "add the files to the mirror, or unset EXSSNET_DATA to download"
        )
    return files


def _belongs(name: str, split: str, config: str | None) -> bool:
    *folders, base = name.split("/")
    return fnmatch(base, f"{split}-*.parquet") and (config is None or config in folders)


def _received(receipt: Path) -> list[Path]:
    """Files verified by an earlier download, without network access or hashing up to 100 GB again."""
    try:
        sizes = parse.json_file(receipt, dict[str, int])
        whole = all(os.path.getsize(file) == size for file, size in sizes.items())
    except (OSError, ParseError):
        return []
    return [Path(file) for file in sizes] if whole else []


def _download(hub_id: str, split: str, config: str | None, receipt: Path) -> list[Path]:
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(hub_id, files_metadata=True)
        wanted = [file for file in info.siblings or [] if _belongs(file.rfilename, split, config)]
        files = [_fetch(hub_id, info.sha, file) for file in sorted(wanted, key=lambda file: file.rfilename)]
    except DataError:
        raise
    # the errors of the library depend on the HTTP client of its version
    except Exception as error:
        raise DataError(_cannot_fetch(hub_id, split, error)) from error
    if not files:
        raise DataError(f"{hub_id} on the hub has no {split}-*.parquet{f' for {config}' if config else ''}")
    _keep_receipt(receipt, files)
    return files


def _fetch(hub_id: str, revision: str | None, file: RepoSibling) -> Path:
    from huggingface_hub import hf_hub_download

    path = Path(hf_hub_download(hub_id, file.rfilename, repo_type="dataset", revision=revision))
    if file.lfs is None:
        return path  # a small file stored in git: the hub has no SHA-256 for it
    found = _sha256(path)
    if found != file.lfs.sha256:
        os.unlink(os.path.realpath(path))
        path.unlink(missing_ok=True)
        raise DataError(
            f"{file.rfilename} of {hub_id} arrived with SHA-256 {found[:12]}…, the hub states "
            f"{file.lfs.sha256[:12]}…: the copy was deleted; try again"
        )
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _keep_receipt(receipt: Path, files: list[Path]) -> None:
    partial = receipt.with_name(f"{receipt.name}.{os.getpid()}.partial")
    try:
        receipt.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({str(file): file.stat().st_size for file in files}))
        os.replace(partial, receipt)
    except OSError:
        return  # only costs a request and hashing again next time


def _cannot_fetch(hub_id: str, split: str, error: Exception) -> str:
    mirror = os.environ.get("EXSSNET_DATA")
    looked = f"in EXSSNET_DATA={mirror} and on the hub" if mirror else "on the hub (EXSSNET_DATA is not set)"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"cannot find {hub_id} ({split}-*.parquet) {looked}: {type(error).__name__}: {reason}; "
        "set EXSSNET_DATA to a folder that has it, or connect to the internet (gated data sets need a hub login)"
    )
