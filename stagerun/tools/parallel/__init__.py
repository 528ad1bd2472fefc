"""`run --parallel N`: stages that don't wait for each other, side by side on one machine. `stages` starts and ends their processes, `folder`
makes the folder of each and takes over what came of it. The trunk finds both by `base.wings`."""
