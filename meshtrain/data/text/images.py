"""Refuse images, videos and sounds in records: only text is trained on."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from meshtrain.config.problems import shortened

IMAGE_KEYS = ("image", "images", "pixel_values", "video", "videos", "audio", "audios")
"""Keys under which data sets for multimodal models keep what is not text."""
TEXT_ALONE = "meshtrain trains on text alone"
OTHER_TYPES = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


def check_no_images(record: Mapping[str, Any], *, but: Collection[str] = (), strings: bool = True) -> None:
    """Check that a record, or a message of it, holds no images, videos or sounds.

    Args:
        but: keys that the user has named as text.
        strings: whether a string is an image: its path or address.

    Raises:
        ValueError: naming the key.
    """
    for key in IMAGE_KEYS:
        value = record.get(key)
        if key not in but and value and (strings or not isinstance(value, str)):
            what = json.dumps(value) if isinstance(value, str) else type_name(value)
            raise ValueError(f'the key "{key}" holds {shortened(what)} beside the text, and {TEXT_ALONE}')


def type_name(value: object) -> str:
    """Return the JSON name of the type of a value."""
    return "null" if value is None else "text" if isinstance(value, str) else OTHER_TYPES[type(value)]
