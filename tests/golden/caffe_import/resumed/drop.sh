#!/bin/sh
# after train.sh
mpirun -np 2 caffe train --solver cifar_solver_drop.prototxt --snapshot snapshots/cifar_iter_4000.solverstate 2>&1 | tee drop.log
