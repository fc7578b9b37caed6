package uring

import "errors"

func Available() error { return errors.New("not yet") }
