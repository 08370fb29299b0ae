"""Fifty tenants with a secret each, paged out and back under load: each hears only its own.

The model repeats, token for token, the secret that it finds in its KV: a request that reads a
block of another tenant says that tenant's secret.
"""

from __future__ import annotations

import random

import fake_model
import pytest
from fake_model import greedy, make_engine, run, step
from patience import PATIENCE_S

from quire.kv.tiers.ssd.geometry import DATA_FILE, Geometry
from quire.kv.tiers.ssd.tier import SsdTier

BLOCK = 4
IMAGE = 4 * BLOCK
SESSIONS = 50
COMMON = [7] * 12
QUESTION = [9, 8, 9, 8, 9]
SECRET_AT, SECRET_LENGTH = len(COMMON), 8
PROMPT_LENGTH = len(COMMON) + SECRET_LENGTH + len(QUESTION)

_dice = random.Random(0)
SECRETS = [[_dice.randrange(10, 50) for _ in range(SECRET_LENGTH)] for _ in range(SESSIONS)]


def prompt_of(session):
    return COMMON + SECRETS[session] + QUESTION


def salt_of(session):
    return f"tenant {session}"


@pytest.fixture(autouse=True)
def parrot(monkeypatch):
    def repeat(context, *_):
        return int(context[SECRET_AT + len(context) - PROMPT_LENGTH])

    monkeypatch.setattr(fake_model, "next_token", repeat)


def ask(engine, name, session, prompt=None):
    params = greedy(SECRET_LENGTH)
    engine.add_request(name, prompt or prompt_of(session), params, cache_salt=salt_of(session))


def check_answer(output, session):
    said = output.outputs[0].token_ids
    foreign = [i for i, secret in enumerate(SECRETS) if i != session and secret == said]
    assert not foreign, f"tenant {session} heard the secret of {foreign}"
    assert said == SECRETS[session]


def open_disk(folder, blocks):
    return SsdTier([folder], Geometry(IMAGE, BLOCK).quota_for(blocks), IMAGE, BLOCK)


def test_nobody_hears_the_secret_of_another(tmp_path):
    dice = random.Random(1)
    disk = open_disk(tmp_path, blocks=180)  # more than half of what all have
    engine = make_engine(num_blocks=24, host_slots=60, tiers=[disk], max_seqs=4)
    asked, told = {}, set()
    for number in range(6 * SESSIONS):
        session = dice.randrange(SESSIONS)
        asked[str(number)] = session
        ask(engine, str(number), session)
        for _ in range(dice.randrange(6)):
            for output in step(engine):
                check_answer(output, asked[output.request_id])
                told.add(output.request_id)
        if dice.random() < 0.02:
            engine.scheduler.cache.clear()
    for name, output in run(engine).items():
        check_answer(output, asked[name])
        told.add(name)
    assert told == asked.keys()
    loaded = engine.scheduler.tiering.tokens_by_tier
    assert loaded["host"] > 0 and loaded["ssd"] > 0  # else nothing was paged back
    engine.close()


def test_a_tenant_that_knows_the_prompt_of_another_finds_none_of_its_blocks(tmp_path):
    """Not by guessing it: with the right salt all of it is found, with any other nothing."""
    engine = make_engine(num_blocks=40, host_slots=40, tiers=[open_disk(tmp_path, blocks=100)])
    ask(engine, "owner", 0)
    check_answer(run(engine)["owner"], 0)
    for forget in (lambda: None, engine.scheduler.cache.clear, lambda: page_out(engine)):
        forget()
        ask(engine, "owner", 0)
        assert run(engine)["owner"].num_cached_tokens == 24
        forget()
        guess = f"guess {forget}"
        engine.add_request(guess, prompt_of(0), greedy(1), cache_salt=guess)
        assert run(engine)[guess].num_cached_tokens == 0
    engine.close()


@pytest.mark.parametrize("what", ["the whole block", "its image"])
def test_a_block_of_the_disk_with_the_content_of_another_is_refused(tmp_path, what):
    disk = open_disk(tmp_path, blocks=100)
    engine = make_engine(num_blocks=40, host_slots=40, tiers=[disk])
    for session in (0, 1):
        ask(engine, str(session), session)
    run(engine)
    page_out(engine)
    put_in_place_of(disk, tmp_path, 0, 1, what)
    ask(engine, "again", 0)
    output = run(engine)["again"]
    check_answer(output, 0)
    assert output.cached_tokens_by_tier == {"ssd": len(COMMON)}  # up to the first bad block
    drops = disk.stats()["drops"]
    assert drops == {"foreign" if what == "the whole block" else "corrupt": 2}
    engine.close()


def page_out(engine):
    """Only the disk has it."""
    store = engine.scheduler.tiering.store
    assert store.flush(PATIENCE_S)
    engine.scheduler.tiering.wait_for_copies(PATIENCE_S)
    engine.scheduler.cache.clear()
    store.host.clear()
    engine.runner.after_step()


def put_in_place_of(disk, folder, victim, source, what):
    """Copy the blocks with the secret of one tenant over those of another, in the file itself."""
    geometry = Geometry(IMAGE, BLOCK)
    skip = 0 if what == "the whole block" else geometry.head_bytes
    with open(folder / DATA_FILE, "r+b", buffering=0) as file:
        for theirs, mine in zip(slots_of(disk, source), slots_of(disk, victim), strict=True):
            file.seek(theirs * geometry.slot_bytes + skip)
            stolen = file.read(geometry.slot_bytes - skip)
            file.seek(mine * geometry.slot_bytes + skip)
            file.write(stolen)


def slots_of(disk, session):
    """Where the blocks with a tenant's secret are."""
    engine = make_engine(num_blocks=4, host_slots=0)
    store = engine.scheduler.tiering.store
    names = store.names(prompt_of(session), salt_of(session))
    engine.close()
    secret = names[SECRET_AT // BLOCK : (SECRET_AT + SECRET_LENGTH) // BLOCK]
    return [disk._store.catalog.places[name.key] for name in secret]
