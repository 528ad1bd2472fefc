"""`stagerun import caffe`: a folder of Caffe's solver files and nets becomes a schedule's folder. Nothing in it is run. `order` reads what was
trained after what, `settings` and `nets` what solvers and nets say; `convert` makes stages of it, `write` their folder."""
