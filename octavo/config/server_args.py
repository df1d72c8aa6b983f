"""`ServerArgs`: what a user types about the HTTP server, besides the engine's options."""

from dataclasses import dataclass
from typing import Any

from octavo.config.options import check_options, option
from octavo.errors import ConfigError

LISTENING, ACCESS, _CHAT, _REPLIES = "Listening", "Access", "Chat", "Replies"
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(kw_only=True)
class ServerArgs:
    """Options of the server. Wrong values raise `ConfigError` naming the option."""

    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 is every address of the machine.", group=LISTENING)
    port: int = option(8000, "Port to listen at; 0 takes a free one.", group=LISTENING, low=0, high=65535)
    uds: str | None = option(None, "Unix domain socket to listen at instead.", group=LISTENING)
    grpc: bool = option(False, "Serve the engine over gRPC instead of HTTP.", group=LISTENING)
    root_path: str = option("", "Path prefix under which a proxy shows the server.", group=LISTENING)
    ssl_keyfile: str | None = option(None, "Private key of the server's certificate.", group=LISTENING)
    ssl_certfile: str | None = option(None, "Certificate of the server, with its chain.", group=LISTENING)
    ssl_ca_certs: str | None = option(
        None, "Certificates that client certificates are checked against.", group=LISTENING
    )
    ssl_cert_reqs: int = option(
        0, "Client certificates: 0 none, 1 optional, 2 required.", group=LISTENING, choices=(0, 1, 2)
    )
    ssl_ciphers: str | None = option(None, "Ciphers to offer, in OpenSSL's notation.", group=LISTENING)
    shutdown_timeout: float = option(
        0.0, "Seconds that running requests get to finish after SIGTERM or SIGINT.", group=LISTENING, low=0
    )
    uvicorn_log_level: str = option("info", "Log level of the HTTP server.", group=LISTENING, choices=LOG_LEVELS)
    disable_uvicorn_access_log: bool = option(False, "No log line for each HTTP request.", group=LISTENING)

    api_key: list[str] | str | None = option(
        None, "Keys of which a request must bring one. Default: OCTAVO_API_KEY, else open to all.", group=ACCESS
    )
    api_key_file: str | None = option(
        None, "File of further keys, one a line; lines that begin with # hold none.", group=ACCESS
    )
    allowed_origins: list[str] = option([], "Web origins that browsers may call from (CORS); * is all.", group=ACCESS)
    allowed_hosts: list[str] = option(
        [],
        "Names that a server without keys on a loopback address answers to, besides localhost and addresses; * is all.",
        group=ACCESS,
    )
    allowed_methods: list[str] = option(["*"], "HTTP methods allowed to those origins.", group=ACCESS)
    allowed_headers: list[str] = option(["*"], "HTTP headers allowed to those origins.", group=ACCESS)
    allow_credentials: bool = option(False, "Let those origins send cookies and keys.", group=ACCESS)
    enable_request_id_headers: bool = option(False, "Answer with the request's id in X-Request-Id.", group=ACCESS)
    enable_server_load_tracking: bool = option(False, "Serve the number of open requests at /load.", group=ACCESS)
    enable_scale_out: bool = option(
        False, "Serve /inference/v1/generate and the render routes, for fleets that tokenize elsewhere.", group=ACCESS
    )
    enable_admin_routes: bool = option(
        False,
        "Serve /pause, /resume, /is_paused, /sleep, /wake_up, /is_sleeping, /reset_prefix_cache and /server_info.",
        group=ACCESS,
    )
    max_body_bytes: int = option(
        64 << 20, "Largest request body in bytes.", group=ACCESS, low=1, high=4 << 30, size=True
    )
    max_connections: int = option(
        4096, "Most open connections; further ones are answered 503 and closed.", group=ACCESS, low=1, high=1_000_000
    )
    max_concurrency_per_key: int | None = option(
        None, "Most requests in flight for one API key; more are answered 429. Default: no limit.", group=ACCESS, low=1
    )
    client_stall_timeout: float = option(
        60.0,
        "Seconds a client may take for its headers, between two pieces of its body, or to read what it was sent.",
        group=ACCESS,
        above=0,
    )
    ui: bool | None = option(
        None,
        "Serve the page at /. Default: on a loopback address or a socket file, or when a key is set.",
        group=ACCESS,
    )
    disable_fastapi_docs: bool = option(False, "Do not serve /docs and /openapi.json.", group=ACCESS)

    chat_template_content_format: str = option(
        "auto",
        "Whether the chat template gets content as text (string) or as parts (openai). auto: as it reads it.",
        group=_CHAT,
        choices=("auto", "string", "openai"),
    )
    default_chat_template_kwargs: dict[str, Any] = option(
        {}, "Variables for the chat template, unless a request sets them.", group=_CHAT
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring a chat template of their own, run in a sandbox.", group=_CHAT
    )
    escape_special_tokens: bool = option(
        False, "Encode special tokens that clients write into messages as plain text.", group=_CHAT
    )
    enable_auto_tool_choice: bool = option(
        False,
        "Do not start unless it is known how the model writes tool calls. Known, they are read either way.",
        group=_CHAT,
    )
    tool_call_parser: str | None = option(
        None,
        "Format of the model's tool calls (docs/tool-calling.md). Default: by chat template or model type.",
        group=_CHAT,
    )
    tool_parser_plugin: str | None = option(
        None, "Python file with TOOL_FORMATS or REASONING_FORMATS, rows of further formats.", group=_CHAT
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False, "Keep tools from the chat template when a request's tool_choice is none.", group=_CHAT
    )
    reasoning_parser: str | None = option(
        None, "Format of the model's reasoning (docs/reasoning.md). Default: by chat template.", group=_CHAT
    )
    response_role: str = option("assistant", "Role of the answering message.", group=_CHAT)

    return_tokens_as_token_ids: bool = option(
        False, "Show the tokens of logprobs as token_id:N, so that any token can be told.", group=_REPLIES
    )
    enable_prompt_tokens_details: bool = option(
        False, "Say in usage how many prompt tokens came from the cache.", group=_REPLIES
    )
    sse_keep_alive_interval: float = option(
        0.0, "Seconds of silence after which a stream says that it is alive; 0: never.", group=_REPLIES, low=0
    )
    responses_store_bytes: int = option(
        0,
        "Most bytes of responses of /v1/responses kept in memory, for previous_response_id, background and retrieval; "
        "0 keeps none.",
        group=_REPLIES,
        low=0,
        size=True,
    )
    otlp_traces_endpoint: str | None = option(
        None, "OpenTelemetry collector to send a span for each request to (needs octavo[otel]).", group=_REPLIES
    )
    enable_force_include_usage: bool = option(
        False, "End every stream with its usage, as if stream_options asked for it.", group=_REPLIES
    )

    def __post_init__(self) -> None:
        check_options(self)
        for one, other in (("ssl_keyfile", "ssl_certfile"), ("ssl_certfile", "ssl_keyfile")):
            if getattr(self, one) and not getattr(self, other):
                raise ConfigError(f"{one} needs {other}.", param=other)
        for name in ("ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"):
            if getattr(self, name) and not self.ssl_certfile:
                raise ConfigError(f"{name} has no effect without ssl_certfile and ssl_keyfile.", param=name)
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("ssl_cert_reqs needs ssl_ca_certs to check against.", param="ssl_cert_reqs")
        if self.allow_credentials and not self.allowed_origins:
            raise ConfigError("allow_credentials has no effect without allowed_origins.", param="allow_credentials")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path={self.root_path!r} must start with a slash.", param="root_path")
