// An embedder invents a kind of cache that no batch flushes.
use flush::*;

struct Nothing;

impl Records for Nothing {
    const TLB: bool = false;
    const IOTLB: bool = false;
}

fn main() {}
