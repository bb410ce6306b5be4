"""Steps that start from links.

urls        The step `urls`: links are normalized, and unwanted ones are dropped.
link_rules  Decides which links are worth fetching.
download    The step `download`: each link becomes a document or gets a reason.
fetch       Fetches a page, with retries, limits and robots.txt.
responses   A page, and the reasons why there is none.
extractor   Starts the process that extracts text, and sends it pages.
extraction  The program of that process.
"""
