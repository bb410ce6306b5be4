"""Which links are worth fetching.

Source: the rules of Megatron-LM's tools/openwebtext/blacklist_urls.py (domain, extension, length, form), in words and
lists of our own.
"""

import ipaddress
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import SplitResult, urlsplit, urlunsplit

from tldextract import TLDExtract

from meshtrain.errors import DataError

LONGEST_TOO_SHORT = 8
TOO_SHORT = "too short"
MALFORMED = "malformed"
DOMAIN = "blacklisted domain"
EXTENSION = "blacklisted extension"

LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
DEFAULT_PORTS = {"http": 80, "https": 443}

# Pictures, films, sound and files, or pages that show nothing to somebody who is not logged in.
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
    """What is blacklisted."""

    domains: frozenset[str] = DOMAINS
    extensions: frozenset[str] = EXTENSIONS

    def normalize(self, link: str) -> tuple[str, str | None]:
        """Return the link in its normal form, and why it is not to be fetched, if it is not."""
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
        below = (".".join(labels[first:]) for first in range(len(labels)))
        return any(place in self.domains for place in below if "." in place) or registered_name(host) in self.domains


def load_rules(domains: str | None, extensions: str | None) -> LinkRules:
    """Read the blacklists that files give; those that are None are built in.

    Raises:
        DataError: if a file cannot be read.
    """
    endings = EXTENSIONS if extensions is None else _words_of(extensions, "urls.blacklisted_extensions")
    return LinkRules(
        DOMAINS if domains is None else _words_of(domains, "urls.blacklisted_domains"),
        frozenset(f".{ending.lstrip('.')}" for ending in endings),
    )


@cache
def _extract() -> TLDExtract:
    # The list of suffixes that comes with the package: nothing is asked of the network, nothing kept on disk.
    return TLDExtract(suffix_list_urls=(), cache_dir=None)


def registered_name(host: str) -> str:
    """Return the name that somebody registered: `imgur` of `i.imgur.co.uk`."""
    return _extract()(host).domain


def _words_of(file: str, key: str) -> frozenset[str]:
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{key}: cannot read {file}: {getattr(error, 'strerror', None) or error}; mend it") from error
    words = (line.partition("#")[0].strip().lower() for line in lines)
    return frozenset(word for word in words if word)


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
    shown = f"[{host}]" if ":" in host else host
    place = shown if port in (None, DEFAULT_PORTS[parts.scheme]) else f"{shown}:{port}"
    return SplitResult(parts.scheme, place, parts.path or "/", parts.query, "")


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        labels = host.split(".")
        is_name = all(LABEL.fullmatch(label) for label in labels) and not labels[-1].isdigit()
        return is_name and (len(labels) > 1 or host == "localhost")
    return True
