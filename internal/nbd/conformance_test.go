package nbd

import (
	"fmt"
	"testing"

	"github.com/ubcache/ubcache/internal/blockdev"
	"github.com/ubcache/ubcache/internal/blockdev/devtest"
)

// A device behind our server and client is still a device.
func TestConformance(t *testing.T) {
	for _, block := range []int{512, 4096} {
		for _, o := range []DialOptions{{}, {SimpleReplies: true}, {Connections: 2}} {
			t.Run(fmt.Sprintf("block=%d/simple=%v/connections=%d", block, o.SimpleReplies, o.Connections), func(t *testing.T) {
				devtest.Run(t, func(t *testing.T) blockdev.Device {
					_, path := serve(t, DeviceExport(memory(t, 6<<20, blockdev.MemoryOptions{LogicalBlock: block}), "", false), Options{})
					return dial(t, path, o)
				})
			})
		}
	}
}
