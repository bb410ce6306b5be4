"""Where checkpoints are stored, and how they are published, found, verified and removed.

- `location`: files and directories on this machine or behind a URL.
- `directory`: names and layout of a checkpoint, and how to find checkpoints.
- `publishing`: publish a complete checkpoint, and remove old ones.
- `named_folder`: write a folder that the user names, so that it appears complete.
- `integrity`: compare the files of a checkpoint with their hashes.
"""
