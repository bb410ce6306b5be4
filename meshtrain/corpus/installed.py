"""The packages of the extra `[corpus]`: looked for at the door, before anything of this room is imported."""

from importlib.util import find_spec

from meshtrain.errors import UserError, name_some

PACKAGES = (
    "aiohttp",
    "datatrove",
    "ftfy",
    "lxml_html_clean",
    "protego",
    "py3langid",
    "pyarrow",
    "tldextract",
    "trafilatura",
    "zstandard",
)


def check_installed() -> None:
    """Check that every package of the extra is there.

    Raises:
        UserError: naming those that are missing.
    """
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise UserError(
            f"meshtrain corpus needs packages that are not installed ({name_some(missing)}); "
            'run pip install "meshtrain[corpus]"'
        )
