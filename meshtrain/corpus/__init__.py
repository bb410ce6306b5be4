"""Preparation of a corpus: links or raw documents become shards that are ready to train on.

preparation  Runs the steps of a corpus file, one after another.
steps/       The steps that every corpus uses: read, clean, shuffle, split, and what runs them.
web/         The steps that start from links: filter them, download pages, extract text.
duplicates/  The step that finds and removes near duplicates.
report/      Tables and a page that show what happened to every document.
"""
