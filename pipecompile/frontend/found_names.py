"""The names that a search has found in code, and which attributes code may read by them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pipecompile.frontend.attribute_reads import GETTER
from pipecompile.frontend.code_names import ANY, OF_TENSORS, CodeNames, strings_in

__all__ = ["FIRST_NAMES", "FoundNames"]

# `object.__getattribute__(self, name)` and `inspect.getattr_static` ask no class of the user's, in
# which reads are noted.
PAST_CLASSES = ("object", GETTER)
STATICALLY = "getattr_static"


@dataclass(frozen=True)
class FoundNames:
    """All names in the code that was found, and those of what may not be there.

    `qualified` are names that tensors have too, with what they are read of (`CodeNames`), and
    `computing` the names in code of the user by which it may read attributes whose names it
    computes.
    """

    names: frozenset[str] = frozenset()
    may_be_absent: frozenset[str] = frozenset()
    qualified: frozenset[tuple[str, str]] = frozenset()
    computing: frozenset[str] = frozenset()

    def with_code(self, reads: CodeNames) -> FoundNames:
        """Return these names with those that code reads; what it computes with is not added."""
        # Most code reads what other code has read, and copies of thousands of names take time.
        if (
            reads.names <= self.names
            and reads.may_be_absent <= self.may_be_absent
            and reads.qualified <= self.qualified
        ):
            return self
        return FoundNames(
            self.names | reads.names,
            self.may_be_absent | reads.may_be_absent,
            self.qualified | reads.qualified,
            self.computing,
        )

    def with_texts(self, values: Iterable[Any]) -> FoundNames:
        """Return these names with the strings in `values`: code may look for them in any object."""
        texts = frozenset[str]().union(*map(strings_in, values))
        return FoundNames(
            self.names | texts,
            self.may_be_absent | texts,
            self.qualified | {(ANY, text) for text in texts},
            self.computing,
        )

    def with_computing(self, names: Iterable[str]) -> FoundNames:
        """Return these names with those by which code of the user may compute others."""
        computing = self.computing.union(names)
        return FoundNames(self.names, self.may_be_absent, self.qualified, computing)

    @property
    def look_past_classes(self) -> bool:
        """Whether code names what reads an attribute without asking the class of its object."""
        is_own = GETTER in self.computing
        return is_own or PAST_CLASSES in self.qualified or STATICALLY in self.names

    def among(self, attributes: Iterable[str]) -> list[str]:
        """Return those of the attributes that code names."""
        return [name for name in attributes if name in self.names]

    def have(self, name: str, owners: Iterable[str]) -> bool:
        """Return whether code names an attribute that something called like one of `owners` has:
        one that tensors have too only if code reads it of something with that name.
        """
        return name in self.names and (
            name not in OF_TENSORS or any((owner, name) in self.qualified for owner in owners)
        )


FIRST_NAMES = FoundNames(frozenset({"forward"}))
"""What a search begins with."""
