"""The OpenAI API over a deployment: `dsv41-client openai-proxy` (extra `openai-proxy`).

`requests` reads bodies, `deployment` speaks gRPC, `answer_reader` splits what the model wrote,
`chat_format` and `completion_format` build responses, `app` puts them behind HTTP. Reading,
splitting and building know neither HTTP nor gRPC.
"""
