"""The page at /: what is sent, to whom, and with which headers. What it does in a browser is test_page_browser.py's."""

from dataclasses import replace
from importlib.resources import files

import pytest

from octavo.config.engine import PoolingConfig
from octavo.server.ui.routes import PAGE_PATHS
from tests.server.fake_engine import FakeEngine, make_config
from tests.server.http import client_of, error_of

OPEN = {"host": "0.0.0.0"}


async def test_files_headers_and_head():
    async with client_of() as client:
        for path in PAGE_PATHS:
            response = await client.get(path)
            assert response.status_code == 200 and response.text
            kind = "html" if path == "/" else {"css": "css", "js": "javascript"}[path.rpartition(".")[2]]
            assert response.headers["content-type"] == f"text/{kind}; charset=utf-8"
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            head = await client.head(path)
            assert head.status_code == 200 and head.content == b"" and head.headers == response.headers
            error_of(await client.post(path), 405)


async def test_what_has_not_changed_is_not_sent_again():
    async with client_of() as client:
        tag = (await client.get("/ui/page.js")).headers["etag"]
        again = await client.get("/ui/page.js", headers={"if-none-match": f'"other", W/{tag}'})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert (await client.get("/ui/page.css", headers={"if-none-match": tag})).status_code == 200
        assert again.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path",
    ["/ui", "/ui/", "/ui/index.html", "/ui/routes.py", "/ui/../routes.py", "/ui/%2e%2e/app.py", "/ui/..%2fapp.py",
     "/ui//etc/passwd", "/ui/page.js/", "/ui/page.js%00", "/UI/page.js", "/index.html", "//"],
)  # fmt: skip
async def test_nothing_else_is_a_file(path):
    async with client_of() as client:
        error_of(await client.get(f"http://localhost{path}"), 404)


def test_every_file_of_the_folder_is_served_and_names_no_other_host():
    folder = files("octavo.server.ui")
    assets = [entry for entry in folder.iterdir() if entry.name.endswith((".html", ".css", ".js"))]
    assert {"/" if entry.name == "index.html" else f"/ui/{entry.name}" for entry in assets} == PAGE_PATHS
    for entry in assets:
        text = entry.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text and "innerHTML" not in text, entry.name


@pytest.mark.parametrize(
    ("args", "status"),
    [
        ({}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "::1"}, 200),
        ({"host": "127.8.8.8"}, 200),
        ({"uds": "/tmp/octavo.sock", **OPEN}, 200),
        (OPEN, 404),
        ({"host": ""}, 404),
        ({"host": "::"}, 404),
        ({"host": "gpu.example"}, 404),
        ({"host": "localhost.example"}, 404),
        ({"api_key": "secret", **OPEN}, 200),
        ({"ui": True, **OPEN}, 200),
        ({"ui": False}, 404),
        ({"ui": False, "api_key": "secret"}, 404),
    ],
)
async def test_who_gets_the_page(args, status):
    async with client_of(**args) as client:
        for path in PAGE_PATHS:
            assert (await client.get(path)).status_code == status, path


async def test_the_key_of_the_environment_opens_the_page_but_not_the_api(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    async with client_of(**OPEN) as client:
        page = await client.get("/")
        assert page.status_code == 200 and "secret" not in page.text
        error_of(await client.get("/v1/models"), 401)


@pytest.mark.parametrize(("root_path", "base"), [("", "./"), ("/a/b", "/a/b/"), ("/a/", "/a/"), ('/"><b>', None)])
async def test_urls_are_relative_to_the_root_path(root_path, base):
    async with client_of(root_path=root_path) as client:
        text = (await client.get("/")).text
        assert f'<base href="{base or "/&quot;&gt;&lt;b&gt;/"}">' in text
        assert 'href="/' not in text.replace("<base href", "") and 'src="/' not in text
        if base and root_path:
            assert (await client.get(base + "ui/page.js")).status_code == 200


async def test_a_pooling_model_says_what_it_does_instead():
    async with client_of() as client:
        assert 'data-tasks=""' in (await client.get("/")).text
    pooling = PoolingConfig(["embed", "score"], False, False, "mean", "all", "normalize", 8)
    config = replace(make_config(), pooling=pooling)
    async with client_of(FakeEngine(config=config)) as client:
        assert 'data-tasks="embed, score"' in (await client.get("/")).text
