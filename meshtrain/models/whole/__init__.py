"""Multimodal models, of which only the language half is trained.

- `causal_class`: the causal LM class of a text model, made where transformers has none.
- `half`: find the language half inside of a whole model on meta.
- `proof`: whether the half computes what the whole model computes on text.
- `folder`: the folder that a half came from, and the half of a folder.
"""
