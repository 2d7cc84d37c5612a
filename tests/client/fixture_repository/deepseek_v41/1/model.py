"""An echo behind the real Triton server, for tests of the client.

A token is a byte of UTF-8; the output repeats the prompt's bytes, of a conversation those of its
last message; max_tokens −1 ends it after the first time. Ids from 300 on in the prompt ask for a
behaviour (see `_BEHAVIOURS`), which a text begins with in brackets, [slow]; ids from 1000 on are
out of range.
"""

import codecs
import json
import re
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

_BEHAVIOURS = {
    300: "error_after_three",  # an error in mid-stream
    301: "several_responses",  # deltas although stream is false
    302: "slow",  # 50 ms a token
    303: "empty_final",  # the final flag comes alone, after the last token
    304: "no_finish_reason",  # the stream ends without a reason
    305: "describe_inputs",  # text_output is a JSON description of the tensors that came
    306: "cached",  # says that 64 prompt tokens were cached
    307: "late_reason",  # the finish reason comes in a response of its own, without tokens
    309: "queue_full",  # refused as a server with a full queue does
    308: "pairs",  # two tokens in each response, of which it says that one was a draft
}
_INPUTS = (
    "text_input",
    "input_ids",
    "max_tokens",
    "stream",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "speculative",
    "end_id",
    "messages",
    "tools",
    "thinking",
    "reasoning_effort",
    "stop_words",
    "logit_bias",
)


def _values(request):
    values = {}
    for name in _INPUTS:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is not None:
            values[name] = tensor.as_numpy()
    return values


def _ids(text):
    """Behaviours first, then the bytes of the rest."""
    numbers = {name: number for number, name in _BEHAVIOURS.items()}
    behaviours = []
    while match := re.match(rf"\[({'|'.join(numbers)})\]", text):
        behaviours.append(numbers[match[1]])
        text = text[match.end() :]
    return np.array([*behaviours, *text.encode()], np.int32)


def _describe(values, request_id):
    described = {}
    for name, value in values.items():
        items = [v.decode() if isinstance(v, bytes) else v for v in value.ravel().tolist()]
        described[name] = [str(value.dtype), list(value.shape), items]
    return json.dumps({"id": request_id, "inputs": described}, sort_keys=True)


class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily(
            name="fixture_tokens_total",
            description="tokens made by the fixture",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self._family = family
        self._tokens = family.Metric(labels={})
        self._lock = threading.Lock()  # two threads in a metric crash this version of the server
        self._threads = []

    def execute(self, requests):
        for request in requests:
            thread = threading.Thread(target=self._serve, args=(request,))
            thread.start()
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def finalize(self):
        for thread in self._threads:
            thread.join()

    def _serve(self, request):
        sender = request.get_response_sender()
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            self._generate(sender, _values(request), request.request_id(), final)
        except pb_utils.TritonModelException as error:
            failure = pb_utils.TritonError(str(error))
            sender.send(pb_utils.InferenceResponse(error=failure), flags=final)

    def _generate(self, sender, values, request_id, final):
        if "messages" in values:
            prompt = _ids(json.loads(values["messages"].ravel()[0])[-1]["content"])
        elif "text_input" in values:
            prompt = _ids(values["text_input"].ravel()[0].decode())
        else:
            prompt = values["input_ids"].ravel()
        if prompt.size == 0:
            raise pb_utils.TritonModelException("[invalid_argument] the prompt is empty")
        if prompt.max() >= 1000 or prompt.min() < 0:
            raise pb_utils.TritonModelException(
                f"[invalid_argument] token ids must be below 1000, got {prompt.max()}"
            )
        asked = {_BEHAVIOURS[i] for i in prompt.tolist() if i >= 300}
        text = prompt[prompt < 256]
        if text.size == 0:
            text = np.array([46], np.int32)
        max_tokens = int(values.get("max_tokens", np.array([16])).ravel()[0])
        fits = max_tokens == -1
        max_tokens = text.size if fits else max_tokens
        end_id = int(values.get("end_id", np.array([-1])).ravel()[0])
        stream = bool(values.get("stream", np.array([False])).ravel()[0])
        if "queue_full" in asked:
            raise pb_utils.TritonModelException("[unavailable] no room in the queue")
        cached = 64 if "cached" in asked else 0
        if "describe_inputs" in asked:
            text_output = _describe(values, request_id)
            self._send(sender, text_output, [], "length", prompt.size, 0, 0, cached, final)
            return
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        ids, texts, made, accepted, reason = [], [], 0, 0, None
        while reason is None:
            if sender.is_cancelled():
                failure = pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
                sender.send(pb_utils.InferenceResponse(error=failure), flags=final)
                return
            if "slow" in asked:
                time.sleep(0.05)
            if "error_after_three" in asked and made == 3:
                raise pb_utils.TritonModelException("[internal] asked to fail after three tokens")
            token = int(text[made % text.size])
            made += 1
            with self._lock:
                self._tokens.increment(1)
            ends = token == end_id or (fits and made == text.size)
            reason = "stop" if ends else "length" if made == max_tokens else None
            ids.append(token)
            texts.append(decoder.decode(bytes([token]), final=reason is not None))
            whole = "pairs" not in asked or len(ids) == 2
            accepted += "pairs" in asked and made % 2 == 0
            if reason is not None and "late_reason" in asked:
                self._send(sender, "".join(texts), ids, None, prompt.size, made, 0, cached, 0)
                ids, texts, cached = [], [], None
            if reason is not None or ((stream or "several_responses" in asked) and whole):
                ends = reason is not None and "empty_final" not in asked
                shown = None if "no_finish_reason" in asked else reason
                counts = prompt.size, made, accepted, cached
                self._send(sender, "".join(texts), ids, shown, *counts, final * ends)
                ids, texts, cached = [], [], None
        if "empty_final" in asked:
            sender.send(flags=final)

    def _send(self, sender, text, ids, reason, num_input, num_output, accepted, cached, flags):
        string = lambda value: np.array([[value.encode()]], dtype=np.object_)  # noqa: E731
        number = lambda value: np.array([[value]], dtype=np.int32)  # noqa: E731
        outputs = [
            pb_utils.Tensor("text_output", string(text)),
            pb_utils.Tensor("output_ids", np.array([ids], dtype=np.int32)),
        ]
        if cached is not None:
            outputs.append(pb_utils.Tensor("cached_tokens", number(cached)))
        if reason is not None:
            outputs += [
                pb_utils.Tensor("finish_reason", string(reason)),
                pb_utils.Tensor("num_input_tokens", number(num_input)),
                pb_utils.Tensor("num_output_tokens", number(num_output)),
                pb_utils.Tensor("num_accepted_drafts", number(accepted)),
            ]
        sender.send(pb_utils.InferenceResponse(output_tensors=outputs), flags=flags)
