"""Text: source files, read in order from any position, and parsed into documents or records.

sources         Expands the named sources into files.
content_hashes  Hashes files, and remembers the hashes.
corpus          Describes source files and how they are read.
byte_streams    Decompresses files, and detects damaged ones.
parquet         Reads the rows of parquet files.
chunks          Reads consecutive parts of files, which can be resumed.
records         Parses chunks into texts or fields.
documents       Reads a corpus document by document in this process.
chat_template   Finds the chat template of a tokenizer.
conversations   Tokenizes conversations and completions, and marks what is trained on.
preferences     Tokenizes answers that people have judged, each with its prompt.
images          Refuses images, videos and sounds in records.
"""
