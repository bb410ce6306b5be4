"""The corpus file: from links or raw documents to a corpus that is ready to be tokenised."""

import os
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from meshtrain.config.path_rules import PathText
from meshtrain.config.words import Count, Fraction, NotNegative, Positive, Seconds, Words

STEPS = ("urls", "download", "clean", "deduplicate", "shuffle", "split")
"""In the order of the chain."""


class UrlsConfig(Words):
    """Which links are worth fetching: not the malformed, too short, repeated or blacklisted ones."""

    lists: list[PathText] = Field(min_length=1)
    """Files and globs of `.txt`, one link per line (relative to the corpus file)."""
    blacklisted_domains: PathText | None = None
    """A file with one domain per line, instead of the built-in list: `imgur` is imgur.com and imgur.de and all below
    them, `news.example.org` is that host and all below it."""
    blacklisted_extensions: PathText | None = None
    """A file with one ending per line such as `.pdf`, instead of the built-in list."""


class DownloadConfig(Words):
    """Fetching pages and extracting their text."""

    user_agent: str = Field(default="meshtrain", min_length=1)
    """Who asks: the owners of sites see it, and robots.txt may name it. Say where you can be reached."""
    concurrent: Count = 64
    """Pages fetched at the same time, over all workers."""
    concurrent_per_host: Count = 2
    """Pages fetched at the same time from one host."""
    connect_seconds: Seconds = 10.0
    """The longest that making a connection may take."""
    total_seconds: Seconds = 60.0
    """The longest that one attempt to fetch a page may take."""
    max_megabytes: Positive = 10.0
    """Larger pages are dropped."""
    max_retries: NotNegative = 4
    """Further attempts after a time-out, a broken connection or a status that may pass (408, 429, 500, 502 to 504)."""
    first_retry_seconds: Seconds = 1.0
    """Wait before the second attempt; it doubles for each further one, and a Retry-After header may ask for more."""
    longest_wait_seconds: Seconds = 60.0
    """A site that asks for a longer wait (Retry-After, or Crawl-delay in robots.txt) is left alone."""
    max_redirects: NotNegative = 5
    """Redirects followed for one page."""
    respect_robots: bool = True
    """Fetch only what robots.txt allows, and no faster than its Crawl-delay."""
    content_types: list[str] = Field(default=["text/html", "application/xhtml+xml", "text/plain"], min_length=1)
    """Pages of another type are dropped; `text/plain` is taken as it is."""
    extraction_seconds: Seconds = 20.0
    """The longest that extracting the text of one page may take."""
    shards: Count = 16
    """Groups of hosts; each is one task, so that many machines can share the work and one host has one visitor."""


class CleanConfig(Words):
    """What is mended in a document, and which documents are left out."""

    fix_text: bool = True
    """Mend wrongly decoded text and entities with ftfy."""
    remove_boilerplate: bool = False
    """Normalise white space and line ends, remove control characters and lines that only ask for JavaScript or
    cookies, and drop documents below 256 characters that speak of JavaScript."""
    languages: list[str] = []
    """Keep documents in these languages (ISO 639-1, such as `en`); left out: in any, unidentified."""
    minimum_confidence: Fraction = 0.5
    """The least probability of the identified language, where `languages` are given."""
    minimum_tokens: NotNegative = 128
    """Shorter documents are dropped."""
    tokenizer: PathText | None = None
    """Count the tokens of this local tokenizer (a Hugging Face directory or tokenizer.json); left out: words,
    and characters where words have no spaces between them."""


class DeduplicateConfig(Words):
    """Near duplicates: MinHash finds candidates, an exact check decides, and one document of each group stays."""

    similarity: Annotated[float, Field(ge=0.1, le=1.0)] = 0.7
    """Jaccard similarity of the sets of word n-grams from which on the later of two documents is removed."""
    ngram: Count = 5
    """Words in an n-gram."""
    num_buckets: Count | None = None
    """MinHash buckets where documents can meet; left out: enough to find 98% of the pairs at `similarity`."""
    hashes_per_bucket: Count | None = None
    """MinHashes that two documents share to meet in a bucket; left out: as many as 128 hashes allow."""


class ShuffleConfig(Words):
    """A random order of all documents."""

    seed: int = 0
    """Another one makes another order."""
    bucket_megabytes: Positive = 256.0
    """About so much text is sorted in memory at once, by each worker."""


class SplitConfig(Words):
    """Documents kept aside; which ones depends on their text alone, so it stays when documents are added."""

    validation: Fraction = 0.01
    """Fraction of the documents."""
    test: Fraction = 0.0
    """Fraction of the documents."""

    @model_validator(mode="after")
    def _something_is_left(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError(f"`validation` + `test` is {self.validation + self.test:g}; nothing is left to train on")
        return self


class SlurmConfig(Words):
    """How Slurm runs the tasks; datatrove's own names."""

    time: str
    """The time limit of a task, as Slurm writes it (`02:00:00`)."""
    partition: str
    """Where Slurm runs them."""
    cpus_per_task: Count = 1
    """Cores for each task."""
    mem_per_cpu_gb: Count = 2
    """Memory for each of its cores, in GB."""
    qos: str | None = None
    """The quality of service."""
    env_command: str | None = None
    """A shell command that activates the Python environment on a node."""
    sbatch_args: dict[str, Any] = {}
    """Further arguments of sbatch."""
    tasks_per_job: Count = 1
    """Tasks that one job of Slurm runs one after another."""


class RayConfig(Words):
    """How Ray runs the tasks; datatrove's own names."""

    address: str = "auto"
    """Of the cluster, as `ray.init` takes it."""
    cpus_per_task: Count = 1
    """Cores for each task."""
    mem_per_cpu_gb: Count = 2
    """Memory for each of its cores, in GB."""
    tasks_per_job: Count = 1
    """Tasks that one job of Ray runs one after another."""


class CorpusConfig(Words):
    """The preparation of a corpus. One TOML file; the tables of steps that it has make up the chain."""

    directory: PathText
    """Where every step writes (relative to the corpus file)."""
    sources: list[PathText] = []
    """Existing documents: `python-stdlib`, or files and globs as in `data.train` of a run; or `[urls]`."""
    text_key: str = "text"
    """The key of a record of the sources that holds the text."""
    on_bad_record: Literal["fail", "skip"] = "fail"
    """What to do with a record of the sources that cannot be read; `skip` drops and counts it."""
    workers: Count = Field(default_factory=lambda: os.cpu_count() or 1)
    """Tasks that run at the same time; the result does not depend on it. Left out: one per core."""
    compression: Literal["gzip", "zstd", "none"] = "gzip"
    """Of everything that is written."""
    shard_megabytes: Positive = 16.0
    """About so much text goes into one file; one task works on one file."""
    executor: Literal["local", "slurm", "ray"] = "local"
    """What runs the tasks: this machine, or datatrove's executor for a cluster that shares `directory`."""
    slurm: SlurmConfig | None = None
    ray: RayConfig = RayConfig()
    urls: UrlsConfig | None = None
    download: DownloadConfig | None = None
    clean: CleanConfig | None = None
    deduplicate: DeduplicateConfig | None = None
    shuffle: ShuffleConfig | None = None
    split: SplitConfig | None = None

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps that the file names, in the order of the chain."""
        return tuple(name for name in STEPS if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _one_beginning(self) -> Self:
        if bool(self.sources) == (self.urls is not None):
            found = "both" if self.sources else "neither"
            raise ValueError(f"{found} of `sources` and `urls` given; begin with existing documents or with links")
        return self

    @model_validator(mode="after")
    def _links_become_text(self) -> Self:
        if self.download is not None and self.urls is None:
            raise ValueError("`download` fetches the links of `urls`; add a table [urls] with their `lists`")
        if self.urls is not None and self.download is None and self.steps != ("urls",):
            raise ValueError("`urls` makes links and no text; add a table [download], or leave out the steps after it")
        return self

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if not self.steps:
            raise ValueError(f"no step is given; add a table for each: [{'], ['.join(STEPS)}]")
        return self

    @model_validator(mode="after")
    def _known_cluster(self) -> Self:
        if self.executor == "slurm" and self.slurm is None:
            raise ValueError('`executor` = "slurm" needs a table [slurm] with `time` and `partition`')
        return self
