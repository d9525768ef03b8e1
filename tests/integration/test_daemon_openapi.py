"""The OpenAPI document over a real daemon."""

from pathlib import Path

from tests.running_daemon import RunningDaemon, fake_model


def test_openapi_document_is_served_from_memory_and_describes_every_protocol(
    tmp_path: Path,
) -> None:
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m"))) as daemon:
        document = daemon.get("/openapi.json")
    assert document["openapi"].startswith("3.")
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        body = document["paths"][path]["post"]["requestBody"]
        assert body["content"]["application/json"]["schema"]
    temperature = document["components"]["schemas"]["SamplingBody"]["properties"]["temperature"]
    assert {"maximum", "minimum"} <= set(temperature["anyOf"][0])
