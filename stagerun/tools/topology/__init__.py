"""`stagerun topology`: this machine's cores, or a described machine's, and which of them each worker gets. The placing itself is in
`stagerun.launch.placing`.
"""
