"""Goal: what an HTTP client sends in place of JSON is refused as its fault, and costs no step."""

from tests.engine_adapters.reference.test_http import scenario, service


def test_a_body_that_cannot_be_read_is_refused_and_is_no_fault_of_ours() -> None:
    more = b'{"prompt": "x", '
    bodies = [
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        more + b'"kv_transfer_params": {"handoff": "push", "registry": "\xff"}}',
        more + b'"kv_transfer_params": {"handoff": ' + b"[" * 100_000,
        more + b'"more": ' + b"[" * 100_000,
        more + b'"request_id": "a\\nb"}',
        more + b'"request_id": "\\u2028"}',
        more + b'"request_id": "' + b"a" * 10_000 + b'"}',
    ]

    async def run() -> None:
        async with service() as s:
            for raw in bodies:
                async with s.session.post(s.url + "/v1/completions", data=raw) as response:
                    assert response.status == 400, (raw[:80], await response.text())
                    assert (await response.json())["error"]["type"] == "invalid_request_error"
            async with s.session.post(s.url + "/tokenize", data=bodies[0]) as response:
                assert response.status == 400
            assert s.engine.alive

    scenario(run)
