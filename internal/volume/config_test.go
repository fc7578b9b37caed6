package volume

import (
	"fmt"
	"testing"
)

// Configurations that nobody goes by are not kept.
func TestReplacedConfigurationsGo(t *testing.T) {
	simulateDrained(t, 512, func(d *drained) error {
		for i := range int64(1000) {
			d.SetSequentialCutoff(i)
		}
		if n := len(d.replaced); n > 2 {
			return fmt.Errorf("%d configurations are kept", n)
		}
		return nil
	})
}
