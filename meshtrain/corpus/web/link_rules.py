"""Rules for links: which ones are worth fetching.

Source: the rules follow those of Megatron-LM's tools/openwebtext/blacklist_urls.py (domain,
extension, length, form), reimplemented with different lists.
"""

import ipaddress
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import SplitResult, urlsplit, urlunsplit

from tldextract import TLDExtract

from meshtrain.errors import DataError, reason_of

LONGEST_TOO_SHORT = 8
"""Links of at most this number of characters are dropped."""
TOO_SHORT = "too short"
MALFORMED = "malformed"
DOMAIN = "blacklisted domain"
EXTENSION = "blacklisted extension"

LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
DEFAULT_PORTS = {"http": 80, "https": 443}

# Sites of pictures, films, sound and files, and sites that show nothing without a login.
DOMAINS = frozenset(
    """500px artstation bandcamp dailymotion deviantart discord docs.google.com drive.google.com dropbox facebook
    flickr gfycat giphy imgflip imgur instagram mixcloud photobucket pinterest redd.it snapchat soundcloud spotify
    streamable tiktok tinypic twitch twitter vimeo x.com youtu.be youtube""".split()  # noqa: SIM905
)
EXTENSIONS = frozenset(
    """.3gp .7z .aac .aiff .apk .avi .bin .bmp .bz2 .css .csv .deb .dmg .doc .docx .eot .epub .exe .flac .flv .gif .gz
    .ico .iso .jar .jpeg .jpg .js .json .m4a .m4v .mkv .mov .mp3 .mp4 .mpeg .mpg .msi .odp .ods .odt .ogg .ogv .otf
    .pdf .png .ppt .pptx .ps .rar .rpm .rss .svg .swf .tar .tgz .tif .tiff .torrent .ttf .wav .webm .webp .wma .wmv
    .woff .woff2 .xls .xlsx .xml .xz .zip .zst""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class LinkRules:
    """Blacklists of domains and extensions."""

    domains: frozenset[str] = DOMAINS
    extensions: frozenset[str] = EXTENSIONS

    def normalize(self, link: str) -> tuple[str, str | None]:
        """Return the link in its normal form, and the reason to drop it or None."""
        if len(link) <= LONGEST_TOO_SHORT:
            return link, TOO_SHORT
        parts = _normal_parts(link)
        if parts is None:
            return link, MALFORMED
        url = urlunsplit(parts)
        if self._has_domain(parts.hostname or ""):
            return url, DOMAIN
        ending = re.search(r"\.[^./]*$", parts.path)
        return url, EXTENSION if ending and ending[0].lower() in self.extensions else None

    def _has_domain(self, host: str) -> bool:
        labels = host.split(".")
        suffixes = (".".join(labels[first:]) for first in range(len(labels)))
        is_listed = any(suffix in self.domains for suffix in suffixes if "." in suffix)
        return is_listed or registered_name(host) in self.domains


def load_rules(domains: str | None, extensions: str | None) -> LinkRules:
    """Read the blacklists.

    Args:
        domains: a file with one domain per line, or None for the built-in list.
        extensions: a file with one extension per line, or None for the built-in list.

    Raises:
        DataError: if a file cannot be read.
    """
    listed = EXTENSIONS if extensions is None else _read_list(extensions, "urls.blacklisted_extensions")
    return LinkRules(
        DOMAINS if domains is None else _read_list(domains, "urls.blacklisted_domains"),
        frozenset(f".{ending.lstrip('.')}" for ending in listed),
    )


@cache
def _extract() -> TLDExtract:
    # Only the list of suffixes inside the package is used: no network, and no cache on disk.
    return TLDExtract(suffix_list_urls=(), cache_dir=None)


def registered_name(host: str) -> str:
    """Return the registered name of a host, such as `imgur` for `i.imgur.co.uk`."""
    return _extract()(host).domain


def _read_list(file: str, key: str) -> frozenset[str]:
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{key}: cannot read {file}: {reason_of(error)}", "fix it") from error
    entries = (line.partition("#")[0].strip().lower() for line in lines)
    return frozenset(entry for entry in entries if entry)


def _normal_parts(link: str) -> SplitResult | None:
    if any(character.isspace() or not character.isprintable() for character in link):
        return None
    try:
        parts = urlsplit(link)
        port, host = parts.port, (parts.hostname or "").encode("idna").decode()
    except ValueError:
        return None
    if parts.scheme not in DEFAULT_PORTS or "@" in parts.netloc or not _is_host(host):
        return None
    name = f"[{host}]" if ":" in host else host
    netloc = name if port in (None, DEFAULT_PORTS[parts.scheme]) else f"{name}:{port}"
    return SplitResult(parts.scheme, netloc, parts.path or "/", parts.query, "")


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        labels = host.split(".")
        is_name = all(LABEL.fullmatch(label) for label in labels) and not labels[-1].isdigit()
        return is_name and (len(labels) > 1 or host == "localhost")
    return True
