//! What a `check` asks for, as far as the testbed has it.

use super::{Layout, Lowered, Lowering};
use crate::{
    format::Check,
    values::{Count, Names},
};

impl Lowering {
    pub(super) fn check(&mut self, check: &Check) -> Lowered {
        self.check_commands(check);
        let of = |names: &Option<Names>| names.clone().unwrap_or_default().0;
        for (names, mapped, in_use) in
            [(&check.mapped, 1, 1), (&check.held, 0, 1), (&check.released, 0, 0)]
        {
            for name in of(names) {
                match self.mappings.get(&name).and_then(|placed| placed.number) {
                    Some(number) => self.emit("mapping", &[number, mapped, in_use]),
                    None => self.skip("a domain's own pages are no mappings to look for"),
                }
            }
        }
        let bits = [(&check.idle, 0, 0), (&check.reading, 1, 0), (&check.writing, 1, 1)];
        for (names, reading, writing) in bits {
            for page in of(names) {
                let number = self.number(&page)?;
                self.emit("in-use", &[number, reading, writing]);
            }
        }
        for (names, kept) in [(&check.free, 0), (&check.kept, 1)] {
            for page in of(names) {
                let number = self.number(&page)?;
                self.emit("kept", &[number, kept]);
            }
        }
        if let Some(references) = check.references {
            for page in of(&check.counted) {
                let number = self.number(&page)?;
                self.emit("counted", &[number, references.into()]);
            }
        }
        for (word, count) in [("pinned", check.pinned), ("held", check.batches_held)] {
            if let Some(count) = count {
                self.emit(word, &[count as u64]);
            }
        }
        if let Some(handles) = check.handles {
            self.emit("handles", &[handles.min, handles.max]);
        }
        if check.tables.is_some() {
            self.skip("table pages are not counted");
        }
        Ok(())
    }

    fn check_commands(&mut self, check: &Check) {
        if let Some(kicks) = check.kicks {
            match self.layout {
                Layout::Separate => self.emit("kicks", &[kicks.min, kicks.max]),
                Layout::Shared => self.skip(super::hardware::NO_WALK),
            }
        }
        let commands = check.commands.as_ref().map(|commands| {
            let iotlb = commands.iter().filter(|command| command.starts_with("iotlb")).count();
            Count { min: iotlb as u64, max: iotlb as u64 }
        });
        let counts = [
            ("commands", commands),
            ("commands", check.iotlb_commands),
            ("flushed", check.pages_flushed),
        ];
        for (word, count) in counts {
            if let Some(count) = count {
                self.emit(word, &[count.min, count.max]);
            }
        }
        if commands.is_some() {
            self.skip("of the commands only the number of those for the IOTLB is compared");
        }
    }
}
