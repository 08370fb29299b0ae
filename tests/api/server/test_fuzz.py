"""The API by its own document: whatever fits it, or almost fits it, is never the server's fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from effort import effort
from hypothesis import HealthCheck, Phase, given, settings
from patience import PATIENCE_S
from server_process import ServerProcess

KEY = {"Authorization": "Bearer sk-one"}  # for servers that ask for one


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


# By server, the routes that it reads texts for, and how many requests it should take at least: most
# ask for a priority, or for texts to be cut too short.
READING = [
    ("embedder", {"/v1/embeddings", "/v1/rerank", "/v1/score"}, 4),
    ("reranker", {"/classify"}, 1),
]


def test_no_request_is_the_servers_fault(document):
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) >= 30
    attempt_all(operations, least=20)


@pytest.mark.parametrize(("name", "routes", "least"), READING, ids=["embedder", "reranker"])
def test_no_text_to_read_is_the_servers_fault(
    name: str, routes: set[str], least: int, request: pytest.FixtureRequest
):
    import schemathesis

    server: ServerProcess = request.getfixturevalue(name)
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=KEY)
    operations = [found.ok() for found in document.get_all_operations()]
    reading = [operation for operation in operations if operation.path in routes]
    assert len(reading) == len(routes)
    attempt_all(reading, least=least)


def attempt_all(operations, least: int) -> None:
    from schemathesis import GenerationMode

    seen: Counter[int] = Counter()
    for operation in operations:
        send(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), seen)
        if operation.query or operation.body:  # nothing can be wrong with a path or a header
            send(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), seen)
    assert seen[200] > least, seen
    assert seen[400] > least, seen


def send(cases, seen: Counter[int]) -> None:
    from schemathesis.checks import not_a_server_error

    @given(case=cases)
    @settings(
        max_examples=effort(4, 25),
        derandomize=effort(True, False),  # so few draws may be refused all, and are the same then
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def attempt(case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # any other name would end the request there
        response = case.call_and_validate(
            checks=(not_a_server_error,), headers=KEY, timeout=PATIENCE_S
        )
        seen[response.status_code] += 1

    attempt()
