#!/bin/sh
mkdir -p snapshots && mpirun -np 2 caffe train --solver cifar_solver.prototxt 2>&1 | tee train.log
