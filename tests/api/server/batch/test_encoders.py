"""Lines that are only read: classes and scores of a batch, behind the requests of clients."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from pooling_models import write_tiny_encoder

from quire.api.server.app import ROUTERS, make_inner_app
from quire.api.server.batch.in_process import InProcessClient, endpoints_of
from quire.api.server.batch.lines import parse_line
from quire.api.server.keys import ANYONE, Keys
from quire.api.server.settings import ServerConfig
from quire.api.server.state import ServerState
from quire.config import EngineConfig
from quire.engine.process.client import EngineClient

CLASSIFY = {"custom_id": "a", "url": "/classify", "body": {"input": ["the cat sat", "a dog"]}}
SCORE = {"custom_id": "b", "url": "/v1/score", "body": {"text_1": "sun", "text_2": ["mat", "on"]}}


def test_classes_and_scores_in_a_batch(tmp_path: Path):
    folder = write_tiny_encoder(tmp_path, "BertForSequenceClassification", num_labels=1)
    config = EngineConfig(str(folder), load_format="dummy", device="cpu", dtype="float32")

    async def main() -> tuple[list[tuple[int, Any]], float]:
        client = await EngineClient.start(config, progress=False, log_level="WARNING")
        try:
            state = ServerState(ServerConfig(), client, "tiny", Keys())
            usual = state.admission.recent_wait_s
            batch = InProcessClient(make_inner_app(state), ANYONE)
            lines = [parse_line(1, json.dumps(each).encode()) for each in (CLASSIFY, SCORE)]
            answers = [await batch.ask(line) for line in lines]
            return answers, state.admission.recent_wait_s - usual
        finally:
            await client.stop()

    assert {CLASSIFY["url"], SCORE["url"]} <= {*endpoints_of(ROUTERS)}
    answers, change = asyncio.run(main())
    assert [status for status, _ in answers] == [200, 200], answers
    classes, scores = (body["data"] for _, body in answers)
    assert [len(each["probs"]) for each in classes] == [1, 1] and len(scores) == 2
    assert change == 0, "how long a batch waits is no advice for clients"
