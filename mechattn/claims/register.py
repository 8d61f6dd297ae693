"""The register: every claim, its version, and the digest by which a changed rule is known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as Seq
from dataclasses import asdict

from mechattn.claims import of_activations, of_answers, of_attention, of_focus
from mechattn.claims.claim import Claim
from mechattn.claims.protocol import ACTIVATIONS, ANALYSES, PROTOCOL, Protocol
from mechattn.results.identity import identity

CLAIMS: tuple[Claim, ...] = (*of_attention.CLAIMS, *of_activations.CLAIMS, *of_answers.CLAIMS, *of_focus.CLAIMS)
VERSION = 1
DIGESTS = {
    1: "67a6c68e88ea2409d5a7fe93451c9a3709170c2ce8cd1ae3d8d33852d2eb7bcb"
}  # of each version: a new rule is a new version, and a test holds that


def digest(claims: Seq[Claim] = CLAIMS, protocol: Protocol = PROTOCOL) -> str:
    """The SHA-256 of the register as canonical JSON: claims in their order, lines, margins, measures, protocol."""
    content = {
        "claims": [asdict(claim) for claim in claims],
        "protocol": asdict(protocol),
        "measured by": identity((*ANALYSES, ACTIVATIONS)),
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
