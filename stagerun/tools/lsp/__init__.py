"""`stagerun lsp`: a language server. `server` and `session` talk to the editor; what it is answered comes from the other modules, which
know no protocol."""
