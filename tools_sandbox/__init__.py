"""Tools for a policy: a sandboxed Python, search, the web, other people's servers.

Standalone: nothing here imports jax or coa_jax. Its public modules:

  client                runs programs and searches a corpus: `Sandbox`, BACKENDS
  jail.wire             a run's limits, result and verdict: Limits, Result, Verdict
  faults                failures by their cause: BadCall, ToolFault, Unavailable, ...
  service.remote        remote sandbox services: RemoteConfig
  search.index          a corpus: Document, Hit, read_corpus
  search.retrieve       a server that searches: Retriever
  web.web_search, web.crawl, web.vision     web tools and their configs
  mcp_client            a tool of an MCP server: McpTool, McpConfig
  chat, http_client     a language model's endpoint: ChatModel, ChatConfig; JSON by HTTP
  jail.keeper           `check`: lists the requirements for a jail that are missing
  http_server           common code for HTTP servers

The rest may change without notice.
"""
