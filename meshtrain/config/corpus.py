"""The corpus file: from links or raw documents to a corpus that is ready to be tokenized."""

import os
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from meshtrain.config.path_rules import PathText
from meshtrain.config.settings import Count, Fraction, NotNegative, Positive, Seconds, Settings
from meshtrain.errors import ConfigError

STEPS = ("urls", "download", "clean", "deduplicate", "shuffle", "split")
"""The steps in the order of the chain."""


class UrlsConfig(Settings):
    """Selection of links. Malformed, too short, repeated and blacklisted links are dropped."""

    lists: list[PathText] = Field(min_length=1)
    """Files and globs of `.txt`, one link per line (relative to the corpus file)."""
    blacklisted_domains: PathText | None = None
    """A file with one domain per line that replaces the built-in list. `imgur` stands for
    imgur.com, imgur.de and all hosts below them; `news.example.org` stands for that host and
    all below it."""
    blacklisted_extensions: PathText | None = None
    """A file with one file ending per line, such as `.pdf`, that replaces the built-in list."""


class DownloadConfig(Settings):
    """Download of pages and extraction of their text."""

    user_agent: str = Field(default="meshtrain", min_length=1)
    """User agent of the requests. Owners of sites see it, and robots.txt may name it. Say where
    you can be reached."""
    concurrent: Count = 64
    """Number of pages fetched at the same time, over all workers."""
    concurrent_per_host: Count = 2
    """Number of pages fetched at the same time from one host."""
    connect_seconds: Seconds = 10.0
    """Longest time in seconds for opening a connection."""
    total_seconds: Seconds = 60.0
    """Longest time in seconds for one attempt to fetch a page."""
    max_megabytes: Positive = 10.0
    """Pages larger than this number of megabytes are dropped."""
    max_retries: NotNegative = 4
    """Number of further attempts after a time-out, a broken connection or a temporary status
    (408, 429, 500, 502-504)."""
    first_retry_seconds: Seconds = 1.0
    """Seconds before the second attempt. The wait doubles for each further one; a Retry-After
    header may ask for more."""
    longest_wait_seconds: Seconds = 60.0
    """A site that asks for a wait of more seconds than this (Retry-After, or Crawl-delay in
    robots.txt) is not fetched."""
    max_redirects: NotNegative = 5
    """Number of redirects followed for one page."""
    respect_robots: bool = True
    """Fetch only what robots.txt allows, and no faster than its Crawl-delay."""
    content_types: list[str] = Field(default=["text/html", "application/xhtml+xml", "text/plain"], min_length=1)
    """Pages of another content type are dropped. `text/plain` is taken as it is."""
    extraction_seconds: Seconds = 20.0
    """Longest time in seconds for extracting the text of one page."""
    shards: Count = 16
    """Number of groups of hosts. Each group is one task, so many machines can share the work
    and one task visits a host."""


class CleanConfig(Settings):
    """Repair of documents, and selection of documents by language and length."""

    fix_text: bool = True
    """Repair wrongly decoded text and entities with ftfy."""
    remove_boilerplate: bool = False
    """Normalize white space and line ends. Remove control characters, and lines that only ask
    for JavaScript or cookies. Drop documents below 256 characters that mention JavaScript."""
    languages: list[str] = []
    """Keep documents in these languages (ISO 639-1, such as `en`). Left out: keep all, without
    identification."""
    minimum_confidence: Fraction = 0.5
    """Least probability of the identified language, if `languages` are given."""
    minimum_tokens: NotNegative = 128
    """Documents with fewer tokens are dropped."""
    tokenizer: PathText | None = None
    """Local tokenizer that counts the tokens (a Hugging Face directory or `tokenizer.json`).
    Left out: words are counted, and characters in languages without spaces between words."""


class DeduplicateConfig(Settings):
    """Removal of near duplicates. MinHash finds candidates, and an exact comparison decides. One
    document of each group stays."""

    similarity: Annotated[float, Field(ge=0.1, le=1.0)] = 0.7
    """Jaccard similarity of the sets of word n-grams at and above which the later of two
    documents is removed."""
    ngram: Count = 5
    """Number of words in an n-gram."""
    num_buckets: Count | None = None
    """Number of MinHash buckets. Left out: enough to find 98% of the pairs at `similarity`."""
    hashes_per_bucket: Count | None = None
    """Number of MinHashes that two documents in a bucket share. Left out: as many as 128 hashes
    allow."""


class ShuffleConfig(Settings):
    """A random order of all documents."""

    seed: int = 0
    """Seed of the order."""
    bucket_megabytes: Positive = 256.0
    """About this many megabytes of text are sorted in memory at once, by each worker."""


class SplitConfig(Settings):
    """Documents that are kept aside. The choice depends on their text alone, so it stays the same
    when documents are added."""

    validation: Fraction = 0.01
    """Fraction of the documents that is kept aside for validation."""
    test: Fraction = 0.0
    """Fraction of the documents that is kept aside as a test set."""

    @model_validator(mode="after")
    def _something_is_left(self) -> Self:
        if self.validation + self.test >= 1:
            raise ConfigError(f"`validation` + `test` is {self.validation + self.test:g}; nothing is left to train on")
        return self


class SlurmConfig(Settings):
    """How Slurm runs the tasks, with the names of datatrove."""

    time: str
    """Time limit of a task, in the format of Slurm (`02:00:00`)."""
    partition: str
    """Partition of Slurm."""
    cpus_per_task: Count = 1
    """Number of cores for each task."""
    mem_per_cpu_gb: Count = 2
    """Memory for each core, in GB."""
    qos: str | None = None
    """Quality of service of Slurm."""
    env_command: str | None = None
    """Shell command that activates the Python environment on a node."""
    sbatch_args: dict[str, Any] = {}
    """Further arguments of `sbatch`."""
    tasks_per_job: Count = 1
    """Number of tasks that one job of Slurm runs one after another."""


class RayConfig(Settings):
    """How Ray runs the tasks, with the names of datatrove."""

    address: str = "auto"
    """Address of the cluster, as `ray.init` takes it."""
    cpus_per_task: Count = 1
    """Number of cores for each task."""
    mem_per_cpu_gb: Count = 2
    """Memory for each core, in GB."""
    tasks_per_job: Count = 1
    """Number of tasks that one job of Ray runs one after another."""


class CorpusConfig(Settings):
    """The preparation of a corpus, in one TOML file. The tables of steps in the file make up
    the chain."""

    directory: PathText
    """Directory into which every step writes (relative to the corpus file)."""
    sources: list[PathText] = []
    """Existing documents: `python-stdlib`, or files and globs as in `data.train` of a run. Give
    these or `[urls]`."""
    text_key: str = "text"
    """Key of a record of the sources that holds the text."""
    on_bad_record: Literal["fail", "skip"] = "fail"
    """What happens to a record of the sources that cannot be read. `skip` drops and counts it."""
    workers: Count = Field(default_factory=lambda: os.cpu_count() or 1)
    """Number of tasks that run at the same time. The result does not depend on it. Left out:
    one per core."""
    compression: Literal["gzip", "zstd", "none"] = "gzip"
    """Compression of all files that are written."""
    shard_megabytes: Positive = 16.0
    """About this many megabytes of text go into one file. One task works on one file."""
    executor: Literal["local", "slurm", "ray"] = "local"
    """What runs the tasks: this machine, or the executor of datatrove for a cluster that shares
    `directory`."""
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
            found = "`sources` and `urls` are both set" if self.sources else "neither `sources` nor `urls` is set"
            raise ConfigError(found, "set one: existing documents, or links")
        return self

    @model_validator(mode="after")
    def _links_become_text(self) -> Self:
        if self.download is not None and self.urls is None:
            raise ConfigError("`download` fetches the links of `urls`", "add a table [urls] with their `lists`")
        if self.urls is not None and self.download is None and self.steps != ("urls",):
            raise ConfigError(
                "`urls` makes links and no text", "add a table [download], or leave out the steps after it"
            )
        return self

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if not self.steps:
            raise ConfigError("no step is set", f"add a table for each: [{'], ['.join(STEPS)}]")
        return self

    @model_validator(mode="after")
    def _known_cluster(self) -> Self:
        if self.executor == "slurm" and self.slurm is None:
            raise ConfigError('`executor` = "slurm" needs a table [slurm] with `time` and `partition`')
        return self
