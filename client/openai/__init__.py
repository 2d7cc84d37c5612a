"""The OpenAI API over a deployment: `dsv41-client openai-proxy` (extra `openai-proxy`).

`fields` judges bodies, `requests` and `guides` turn them into requests, `deployment` speaks gRPC,
`answer_reader` splits what the model wrote, `formats` builds responses, `app` puts them behind
HTTP. Judging, splitting and building know neither HTTP nor gRPC.
"""
