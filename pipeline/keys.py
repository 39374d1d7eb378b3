"""Every name the pipeline uses in Redis, and every number that bounds it.

Owns key names, stage names and limits. Knows nothing about values: a key is built here and nowhere else.

    {ns}:stream:{stage}:{priority}            work of tokenizer and prefill
    {ns}:stream:{stage}:{pool}:{priority}     work of compressor and decode, in reach of one pool
    {ns}:stream:prefill:returned   work that decode sent back to prefill, served first
    {stream}:claims    hash  entry id -> nonce of the claim, and the last commit made under it
    {stream}:tries     hash  entry id -> times delivered
    {ns}:req:{id}      hash  state of a request                      TTL from its terminal entry on
    {ns}:res:{id}      stream  deltas `0-<tokens so far>`, terminal `1-0`         TTL likewise
    {ns}:chunks:{id}:{attempt}   hash  chunk index -> sealed chunk   deleted with the terminal entry
    {ns}:credits:{pool}   hash  request -> attempt and bytes of a pool that it may fill; each leaves with its request
    {ns}:deadlines     zset  request -> when it is given up          each leaves with its request
    {ns}:dead:{stage}  stream  what could not be processed           bounded, TTL
    {ns}:finished      stream  terminal entries of the last requests bounded, TTL
    {ns}:samples       stream  queue lengths and KV bytes over time  bounded, TTL
    {ns}:sampler:{pool}   string  who samples one pool               TTL of a few samples
    {ns}:batches       zset  ids of batches by time of creation      each leaves when its record expires
    {ns}:batch:{id}    hash  record of a batch                       TTL from its end on
    {ns}:batch:{id}:done   stream  its lines that ended and wait to be collected   deleted at its end
    {ns}:arq           zset  arq's queue of job steps                 TTL
    arq:<what>:{ns}:{job}    what arq keeps for a job: its prefix cannot be moved into a namespace     TTL
    {ns}:pools         zset  pools by the time of their last sign of life   TTL of a day
    {ns}:counters      hash  how often what should be rare happened  TTL of a week
    {ns}:counted:{call}   string  counts that have arrived           TTL of an hour
    {ns}:proc:{stage}:{consumer}   a running process                 TTL, renewed by its owner
    {ns}:procs         set  the names of those processes             TTL, renewed likewise

What has no TTL is work in progress: the work streams with their two hashes, the state of requests that have
not ended, batches that have not ended, and lines of a batch that were not collected yet. The streams stay when
they are empty, everything else goes away.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Priority = Literal["interactive", "batch"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""In the order in which they are served."""
Lane = Literal["returned", "interactive", "batch"]
RETURNED: Lane = "returned"
"""The lane of what was sent back to prefill: its reader has waited already."""

STAGES = ("tokenizer", "prefill", "compressor", "decode")
"""In the order in which a request meets them."""
POOLED_STAGES = frozenset({"compressor", "decode"})
"""Stages whose work refers to blobs of one pool."""


def lanes_of(stage: str) -> tuple[Lane, ...]:
    """Return the queues of a stage, in the order in which they are served."""
    return (RETURNED, *PRIORITIES) if stage == "prefill" else PRIORITIES


LEASE_S = 10.0  # a killed process loses its work after this; renewed each third, so two renewals may fail
SWEEPS_PER_LEASE = 4  # a lost item waits at most a quarter lease longer than it must
HANG_LEASES = 6  # an engine that made no progress for this many leases is hung and loses its work
SUSPECT_DELIVERIES = 2  # one that was delivered more often ended its processes, or was beside what did: it runs alone
MAX_DELIVERIES = 5  # more crashes than a restart of everything explains: the item itself is the cause
RESULT_TTL_S = 3600  # time to collect a result, or to resume reading it, after the terminal entry
MAX_QUEUE = 10_000  # per priority and between the door and prefill: about 100 MB of long prompts
ADMIT_RETRY_S = 2.0  # a full queue of any length has moved by then
MAX_DEAD = 1_000  # dead letters kept per stage; approximate, the oldest go first
DEAD_TTL_S = 7 * 24 * 3600  # someone looks within a week
MAX_FINISHED = 1_000  # enough for a trace of the last minutes; approximate, the oldest go first
MAX_SAMPLES = 7_200  # half an hour at the sampler's fastest; approximate
SAMPLES_TTL_S = 3600  # as long as the results that they explain
POOLS_TTL_S = 24 * 3600  # what refers to a pool that is gone for a day has been sent elsewhere long ago
COUNTERS_TTL_S = 7 * 24 * 3600  # as long as dead letters
COUNTED_TTL_S = 3600  # whoever got no answer asks again long before
BATCH_TTL_S = 24 * 3600  # a finished batch can be asked about for a day
PROC_INDEX_TTL_S = 3600  # longer than any registration lives
HANDBACK = "handback"
"""The consumer that handed-back entries belong to until somebody takes them."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Builds key names under one namespace; two stacks on one server differ in it."""

    namespace: str = "sluice"

    def stream(self, stage: str, priority: Lane, pool_id: str | None = None) -> str:
        """Return the work stream of a stage.

        Raises:
            ValueError: for a stage after prefill without a pool.
        """
        if stage not in POOLED_STAGES:
            return f"{self.namespace}:stream:{stage}:{priority}"
        if pool_id is None:
            raise ValueError(f"the stream of stage {stage} is named after a pool, and none is given")
        return f"{self.namespace}:stream:{stage}:{pool_id}:{priority}"

    @staticmethod
    def claims(stream: str) -> str:
        """Return the hash that says who holds which entry."""
        return f"{stream}:claims"

    @staticmethod
    def tries(stream: str) -> str:
        """Return the hash that counts deliveries."""
        return f"{stream}:tries"

    def request(self, request_id: str) -> str:
        """Return the hash with a request's state."""
        return f"{self.namespace}:req:{request_id}"

    def results(self, request_id: str) -> str:
        """Return the stream that readers follow."""
        return f"{self.namespace}:res:{request_id}"

    def chunks(self, request_id: str, attempt: int) -> str:
        """Return the hash with the sealed chunks of one attempt."""
        return f"{self.chunks_prefix(request_id)}{attempt}"

    def credits(self, pool_id: str) -> str:
        """Return the hash of the credits of one pool."""
        return f"{self.credits_prefix()}{pool_id}"

    def credits_prefix(self) -> str:
        """Return what the names of the pools' credits have in common; a pool's id follows."""
        return f"{self.namespace}:credits:"

    def deadlines(self) -> str:
        """Return the index of requests by the time at which they are given up."""
        return f"{self.namespace}:deadlines"

    def pools(self) -> str:
        """Return the index of pools by the time of their last sign of life."""
        return f"{self.namespace}:pools"

    def counters(self) -> str:
        """Return the hash that counts what should be rare."""
        return f"{self.namespace}:counters"

    def counted(self, ticket: str) -> str:
        """Return what says that a call has added to the counters."""
        return f"{self.namespace}:counted:{ticket}"

    def dead(self, stage: str) -> str:
        """Return the stream of a stage's dead letters."""
        return f"{self.namespace}:dead:{stage}"

    def chunks_prefix(self, request_id: str) -> str:
        """Return what the names of a request's chunk hashes have in common; an attempt follows."""
        return f"{self.namespace}:chunks:{request_id}:"

    def finished(self) -> str:
        """Return the log of terminal entries."""
        return f"{self.namespace}:finished"

    def samples(self) -> str:
        """Return the log of what queues and pool held."""
        return f"{self.namespace}:samples"

    def sampler(self, pool_id: str) -> str:
        """Return the lock of whoever samples a pool and the queues around it."""
        return f"{self.namespace}:sampler:{pool_id}"

    def batches(self) -> str:
        """Return the index of batches."""
        return f"{self.namespace}:batches"

    def batch(self, batch_id: str) -> str:
        """Return the record of a batch."""
        return f"{self.namespace}:batch:{batch_id}"

    def batch_done(self, batch_id: str) -> str:
        """Return the stream of a batch's lines that have ended."""
        return f"{self.namespace}:batch:{batch_id}:done"

    def arq(self) -> str:
        """Return arq's queue; its health key begins with this name and a colon."""
        return f"{self.namespace}:arq"

    def process(self, stage: str, consumer: str) -> str:
        """Return the registration of one process."""
        return f"{self.namespace}:proc:{stage}:{consumer}"

    def processes(self) -> str:
        """Return the index of registrations."""
        return f"{self.namespace}:procs"
