"""Tools for a policy: a sandboxed Python, search, the web, other people's servers.

Standalone: nothing here imports jax or coa_jax. Its public modules:

  client                what runs programs and searches a corpus: `Sandbox`, BACKENDS
  jail.wire             what a run may use, and how it ended: Limits, Result, Verdict
  faults                whose fault a failure is: BadCall, ToolFault, Unavailable, ...
  service.remote        services that run programs: RemoteConfig
  search.index          a corpus: Document, Hit, read_corpus
  search.retrieve       a server that searches: Retriever
  web.web_search, web.crawl, web.vision     tools that read the web, and their configs
  mcp_client            a tool of an MCP server: McpTool, McpConfig
  chat, http_client     a language model's endpoint: ChatModel, ChatConfig; JSON by HTTP
  jail.keeper           `check`: what this machine lacks for the jail
  http_server           what HTTP servers share

The rest may change without notice.
"""
