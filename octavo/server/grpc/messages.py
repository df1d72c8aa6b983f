"""The messages of the engine's gRPC service, `vllm.grpc.engine.VllmEngine`, wire-compatible with vLLM's.

The table below is the protocol: it is made into descriptors when the server starts, so there is no generated code to keep
in step, and reflection shows clients the whole. They live in a pool of their own, beside another package's of that name.
"""

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

PACKAGE = "vllm.grpc.engine"
SERVICE = f"{PACKAGE}.VllmEngine"

# Message -> its fields as a .proto file has them; `in x` puts one into the oneof x.
_MESSAGES = {
    "SamplingParams": """
        optional float temperature = 1; float top_p = 2; uint32 top_k = 3; float min_p = 4;
        float frequency_penalty = 5; float presence_penalty = 6; float repetition_penalty = 7;
        optional uint32 max_tokens = 8; uint32 min_tokens = 9; repeated string stop = 10;
        repeated uint32 stop_token_ids = 11; bool skip_special_tokens = 12; bool spaces_between_special_tokens = 13;
        bool ignore_eos = 14; uint32 n = 15; string json_schema = 16 in constraint; string regex = 17 in constraint;
        string grammar = 18 in constraint; string structural_tag = 19 in constraint;
        bool json_object = 20 in constraint; ChoiceConstraint choice = 21 in constraint; optional int32 logprobs = 22;
        optional int32 prompt_logprobs = 23; optional int32 seed = 24; bool include_stop_str_in_output = 25;
        map<int32,float> logit_bias = 26; optional int32 truncate_prompt_tokens = 27;
        bool grammar_from_first_token = 28""",
    "ChoiceConstraint": "repeated string choices = 1",
    "TokenizedInput": "string original_text = 1; repeated uint32 input_ids = 2",
    "KvTransferParams": "string remote_host = 1; uint32 remote_port = 2",
    "MediaRef": "string modality = 1; string url = 2",
    "MediaRefs": "repeated MediaRef items = 1",
    # Media are refused; that there are some is all that is read of them.
    "MultimodalInputs": "bytes pixel_values = 2",
    "GenerateRequest": """
        string request_id = 1; TokenizedInput tokenized = 2 in input; string text = 3 in input;
        SamplingParams sampling_params = 4; bool stream = 5; KvTransferParams kv_transfer_params = 6;
        optional MultimodalInputs mm_inputs = 7; optional string kv_transfer_params_json = 8;
        optional int32 data_parallel_rank = 9; MediaRefs media_refs = 10;
        repeated MultimodalInputs extra_mm_inputs = 11""",
    "TopLogProbs": "repeated float values = 1; repeated uint32 token_ids = 2",
    "OutputLogProbs": """
        repeated float token_logprobs = 1; repeated uint32 token_ids = 2; repeated TopLogProbs top_logprobs = 3""",
    "InputTokenLogProb": "optional float value = 1",
    "InputLogProbs": """
        repeated InputTokenLogProb token_logprobs = 1; repeated uint32 token_ids = 2;
        repeated TopLogProbs top_logprobs = 3""",
    "GenerateStreamChunk": """
        repeated uint32 token_ids = 1; uint32 prompt_tokens = 2; uint32 completion_tokens = 3;
        uint32 cached_tokens = 4; OutputLogProbs output_logprobs = 5; InputLogProbs input_logprobs = 6;
        uint32 index = 7""",
    "GenerateComplete": """
        repeated uint32 output_ids = 1; string finish_reason = 2; uint32 prompt_tokens = 3;
        uint32 completion_tokens = 4; uint32 cached_tokens = 5; OutputLogProbs output_logprobs = 6;
        InputLogProbs input_logprobs = 7; uint32 index = 8; KvTransferParams kv_transfer_params = 9;
        uint32 matched_token_id = 10 in matched_stop; string matched_stop_str = 11 in matched_stop;
        optional string kv_transfer_params_json = 12""",
    "GenerateResponse": """
        GenerateStreamChunk chunk = 1 in response; GenerateComplete complete = 2 in response""",
    "EmbedRequest": "string request_id = 1; TokenizedInput tokenized = 2",
    "EmbedResponse": "repeated float embedding = 1; uint32 prompt_tokens = 2; uint32 embedding_dim = 3",
    "HealthCheckRequest": "",
    "HealthCheckResponse": "bool healthy = 1; string message = 2",
    "AbortRequest": "repeated string request_ids = 1",
    "AbortResponse": "",
    "GetModelInfoRequest": "",
    "GetModelInfoResponse": """
        string model_path = 1; bool is_generation = 2; uint32 max_context_length = 3; uint32 vocab_size = 4;
        bool supports_vision = 5; string served_model_name = 6; string tokenizer_path = 7; string model_type = 8;
        repeated string architectures = 9; repeated int32 eos_token_ids = 10; int32 pad_token_id = 11;
        int32 bos_token_id = 12; int32 max_req_input_len = 13; string default_sampling_params_json = 14""",
    "GetServerInfoRequest": "",
    "GetServerInfoResponse": """
        uint32 active_requests = 1; bool is_paused = 2; double last_receive_timestamp = 3; double uptime_seconds = 4;
        string server_type = 5; string kv_connector = 6; string kv_role = 7; string kv_engine_id = 8;
        int32 data_parallel_size = 9""",
    "GetLoadsRequest": "optional int32 dp_rank = 1; repeated string include = 2",
    "SchedulerLoad": """
        int32 dp_rank = 1; int32 num_running_reqs = 2; int32 num_waiting_reqs = 3; int32 num_total_reqs = 4;
        double token_usage = 7; int32 max_running_requests = 11""",
    "GetLoadsResponse": """
        string timestamp = 1; string version = 2; int32 dp_rank_count = 3; repeated SchedulerLoad loads = 4""",
}

# Method -> (request, answer, whether the answers are a stream).
METHODS = {
    "Generate": ("GenerateRequest", "GenerateResponse", True),
    "Embed": ("EmbedRequest", "EmbedResponse", False),
    "HealthCheck": ("HealthCheckRequest", "HealthCheckResponse", False),
    "Abort": ("AbortRequest", "AbortResponse", False),
    "GetModelInfo": ("GetModelInfoRequest", "GetModelInfoResponse", False),
    "GetServerInfo": ("GetServerInfoRequest", "GetServerInfoResponse", False),
    "GetLoads": ("GetLoadsRequest", "GetLoadsResponse", False),
}

_FIELD = re.compile(r"(?:(optional|repeated) )?([\w<>,]+) (\w+) = (\d+)(?: in (\w+))?")
_SCALARS = {
    "float": Field.TYPE_FLOAT,
    "double": Field.TYPE_DOUBLE,
    "int32": Field.TYPE_INT32,
    "uint32": Field.TYPE_UINT32,
    "bool": Field.TYPE_BOOL,
    "string": Field.TYPE_STRING,
    "bytes": Field.TYPE_BYTES,
}


class Messages:
    """The message classes by name: `messages.GenerateRequest`."""

    def __init__(self) -> None:
        self.pool = descriptor_pool.DescriptorPool()
        self.pool.Add(_describe_file())

    def __getattr__(self, name: str) -> Any:
        if name not in _MESSAGES:
            raise AttributeError(name)
        made = message_factory.GetMessageClass(self.pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        setattr(self, name, made)
        return made


def _describe_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="vllm_engine.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        _describe_message(file.message_type.add(name=name), fields)
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for name, (request, answer, is_stream) in METHODS.items():
        service.method.add(
            name=name,
            input_type=f".{PACKAGE}.{request}",
            output_type=f".{PACKAGE}.{answer}",
            server_streaming=is_stream,
        )
    return file


def _describe_message(message: descriptor_pb2.DescriptorProto, fields: str) -> None:
    """Fill in the fields. A oneof of one field is what proto3 makes of `optional`; those stand behind the real ones."""
    rows = [match.groups() for match in _FIELD.finditer(fields)]
    oneofs = list(dict.fromkeys(oneof for *_, oneof in rows if oneof))
    oneofs += [f"_{name}" for label, _, name, *_ in rows if label == "optional"]
    for oneof in oneofs:
        message.oneof_decl.add(name=oneof)
    for label, kind, name, number, oneof in rows:
        field = message.field.add(name=name, number=int(number), label=Field.LABEL_OPTIONAL)
        if label == "repeated":
            field.label = Field.LABEL_REPEATED
        elif label == "optional":
            field.proto3_optional, oneof = True, f"_{name}"
        if oneof:
            field.oneof_index = oneofs.index(oneof)
        if kind.startswith("map<"):
            _describe_map(message, field, *kind[4:-1].split(","))
        elif kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type, field.type_name = Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"


def _describe_map(message: descriptor_pb2.DescriptorProto, field: Field, key: str, value: str) -> None:
    """A map is a repeated message of keys and values."""
    entry = message.nested_type.add(name="".join(map(str.capitalize, field.name.split("_"))) + "Entry")
    entry.options.map_entry = True
    for number, (name, kind) in enumerate((("key", key), ("value", value)), 1):
        entry.field.add(name=name, number=number, label=Field.LABEL_OPTIONAL, type=_SCALARS[kind])
    field.label, field.type = Field.LABEL_REPEATED, Field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
