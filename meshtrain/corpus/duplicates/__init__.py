"""The step `deduplicate`: near duplicates are found with MinHash, compared exactly, and removed.

deduplication  The passes of the step, and the blocks that they run.
shingles       Word n-grams of a document, as hashes.
minhash        MinHash signatures and how they are cut into bands.
sketches       What the step stores on disk for every document.
buckets        Which documents share a bucket, and which components they form.
comparison     Compares documents that share a bucket, and decides which are removed.
"""
