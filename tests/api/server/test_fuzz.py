"""The API by its own document: whatever fits it, or almost fits it, is never the server's fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import pytest
from effort import effort
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from patience import PATIENCE_S
from server_process import ServerProcess


@pytest.fixture(scope="module")
def fuzzed(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = str(tmp_path_factory.mktemp("files"))
    flags = ["--max-model-len", "64", "--batch-dir", folder]  # no answer is long
    server = ServerProcess.tiny(tiny, *flags)
    yield server
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log, server.log


@pytest.fixture(scope="module")
def document(fuzzed: ServerProcess):
    import schemathesis

    return schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")


@pytest.fixture(scope="module")
def embedder_document(embedder: ServerProcess):
    import schemathesis

    return schemathesis.openapi.from_url(f"{embedder.url}/openapi.json")


def test_no_request_is_the_servers_fault(document):
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) >= 30
    attempt_all(operations, least=20)


def test_no_text_to_read_is_the_servers_fault(embedder_document):
    operations = [found.ok() for found in embedder_document.get_all_operations()]
    reading = [op for op in operations if op.path in ("/v1/embeddings", "/v1/rerank", "/v1/score")]
    assert len(reading) == 3
    attempt_all(reading, least=4)  # most ask for a priority, or to be cut too short


def attempt_all(operations, least: int) -> None:
    from schemathesis import GenerationMode

    seen: Counter[int] = Counter()
    for operation, mode in product(operations, GenerationMode):
        with suppress(Unsatisfiable):  # nothing can be wrong with a request that says nothing
            send(operation.as_strategy(generation_mode=mode), seen)
    assert seen[200] > least, seen
    assert seen[400] > least, seen


def send(cases, seen: Counter[int]) -> None:
    from schemathesis.checks import not_a_server_error

    @given(case=cases)
    @settings(
        max_examples=effort(8, 25),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def attempt(case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # any other name would end the request there
        response = case.call_and_validate(checks=(not_a_server_error,), timeout=PATIENCE_S)
        seen[response.status_code] += 1

    attempt()
