//! The invalidation queue: fetched early, carried out late
//!
//! A tail write only lets the unit fetch. A fetched command is carried out after the unit's latency, in order;
//! the status write of a wait is the only thing that says so (VT-d specification, section 6.5.2).

use super::Unit;
use super::command::{Command, parse};
use super::dma::Fabric;
use super::registers::{
    FSTS_ICE, FSTS_IQE, FSTS_ITE, GSTS_QIES, GSTS_RTPS, GSTS_TES, GSTS_WBFS, IQA_SIZE,
};
use crate::failure::{Failure, Lie, Misuse, OperationKind};
use crate::ram::View;
use crate::world::World;

/// A descriptor that has left the queue and is not done yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetched {
    command: Command,
    /// Ticks until it is carried out.
    wait: u32,
    failure: Option<Failure>,
    pub(super) hangs: bool,
}

impl Unit {
    /// Bytes in the ring.
    pub(super) fn ring_bytes(&self) -> u64 {
        4096 << (self.iqa & IQA_SIZE)
    }

    fn queue_runs(&self) -> bool {
        self.gsts & GSTS_QIES != 0 && self.fsts & (FSTS_IQE | FSTS_ITE) == 0 && !self.hung
    }

    /// One step of time: carries out what is due, then fetches.
    pub(crate) fn tick(&mut self, world: &mut World, fabric: &mut Fabric) {
        self.finish_register_work(world, fabric);
        let steps = 1 + world.whim.below(3);
        for _ in 0..steps {
            self.carry_out_front(world, fabric);
        }
        if self.gsts & GSTS_TES != 0 && world.whim.chance(6) {
            self.iotlb.evict(world.whim.below(self.iotlb.len()));
        }
        self.fetch(world);
    }

    fn finish_register_work(&mut self, world: &mut World, fabric: &mut Fabric) {
        if self.hung {
            return;
        }
        if let Some((gsts, left)) = self.command_pending {
            if left > 1 {
                self.command_pending = Some((gsts, left - 1));
            } else {
                self.command_pending = None;
                self.apply_command(world, gsts);
            }
        }
        if let Some(left) = self.register_context {
            if left > 1 {
                self.register_context = Some(left - 1);
            } else {
                self.register_context = None;
                self.register_context_done(world);
            }
        }
        if let Some(left) = self.register_iotlb {
            if left > 1 {
                self.register_iotlb = Some(left - 1);
            } else {
                self.register_iotlb = None;
                self.register_iotlb_done(world, fabric);
            }
        }
    }

    /// A global command takes effect and shows in GSTS.
    fn apply_command(&mut self, world: &mut World, gsts: u32) {
        let changed = gsts ^ self.gsts;
        if gsts & GSTS_WBFS != 0 {
            // A one-shot: the status falls back when the buffer is empty.
            world.ram.flush_buffer();
            self.gsts = gsts & !GSTS_WBFS;
            return;
        }
        if gsts & GSTS_RTPS != 0 && changed & GSTS_RTPS != 0 {
            self.root_table = self.root_register;
        }
        if changed & GSTS_QIES != 0 {
            self.iqh = 0;
            self.fetched.clear();
            self.hung = false;
        }
        self.gsts = gsts;
    }

    /// Fetches descriptors while there is room and nothing is wrong.
    pub(super) fn fetch(&mut self, world: &mut World) {
        while self.queue_runs()
            && self.fetched.len() < self.config.fetch_ahead.max(1)
            && self.iqh != self.iqt
        {
            let at = (self.iqa & !0xfff).saturating_add(self.iqh);
            let words = world
                .ram
                .read(at, View::Coherent)
                .zip(world.ram.read(at.saturating_add(8), View::Coherent));
            let parsed = words.and_then(|(low, high)| parse(&self.config, low, high).ok());
            let kind = match parsed {
                Some(Command::Wait { .. }) => OperationKind::Wait,
                _ => OperationKind::Command,
            };
            let failure = world.operation(kind);
            let (Some(command), true) = (parsed, failure != Some(Failure::QueueError)) else {
                // The head stays on the bad descriptor.
                self.fsts |= FSTS_IQE;
                self.fault_event();
                return;
            };
            self.iqh = (self.iqh + 16) % self.ring_bytes();
            self.fetched.push_back(Fetched {
                command,
                wait: self.config.latency.max(1),
                failure,
                hangs: failure == Some(Failure::Hang),
            });
            self.note_misuse(world, command);
            if self.lie == Some(Lie::EarlyWait) {
                self.complete_waits_early(world);
            }
        }
    }

    fn note_misuse(&self, world: &mut World, command: Command) {
        match command {
            Command::Wait { status: Some(_), interrupt: true, .. } => {
                world.misuse(Misuse::WaitWithBoth)
            }
            Command::DeviceTlb { .. } if self.gsts & GSTS_TES == 0 => {
                world.misuse(Misuse::DeviceTlbWhileOff);
            }
            Command::Wait { .. }
            | Command::DeviceTlb { .. }
            | Command::Context { .. }
            | Command::Iotlb { .. }
            | Command::Interrupt => {}
        }
    }

    fn complete_waits_early(&mut self, world: &mut World) {
        let waits: Vec<Command> = self
            .fetched
            .iter()
            .map(|fetched| fetched.command)
            .filter(|command| matches!(command, Command::Wait { .. }))
            .collect();
        self.fetched.retain(|fetched| !matches!(fetched.command, Command::Wait { .. }));
        for wait in waits {
            self.complete_wait(world, wait);
        }
    }

    fn carry_out_front(&mut self, world: &mut World, fabric: &mut Fabric) {
        if self.hung {
            return;
        }
        let Some(front) = self.fetched.front_mut() else {
            return;
        };
        if front.hangs {
            self.hung = true;
            return;
        }
        if front.wait > 1 {
            front.wait -= 1;
            return;
        }
        let Some(front) = self.fetched.pop_front() else {
            return;
        };
        // Those behind have waited as long; in order, one a step.
        for behind in &mut self.fetched {
            behind.wait = 1;
        }
        let timed_out =
            front.failure == Some(Failure::TimeOut) || self.device_is_silent(fabric, front.command);
        if timed_out {
            if let Command::DeviceTlb { sid, .. } = front.command
                && !fabric.is_behind(self.id, sid)
            {
                world.misuse(Misuse::WrongUnit(sid));
            }
            self.time_out(front.command);
            return;
        }
        if front.failure == Some(Failure::CompletionError) {
            self.fsts |= FSTS_ICE;
            self.fault_event();
        }
        self.carry_out(world, fabric, front.command);
    }

    fn device_is_silent(&self, fabric: &Fabric, command: Command) -> bool {
        match command {
            Command::DeviceTlb { sid, .. } => !fabric.answers(self.id, sid),
            Command::Context { .. }
            | Command::Iotlb { .. }
            | Command::Interrupt
            | Command::Wait { .. } => false,
        }
    }

    /// Sets the time-out error: waits inside the unit are dropped, and nothing more is fetched until the error
    /// is cleared (section 6.5.2, "hardware handling of queued invalidation interface errors").
    fn time_out(&mut self, cause: Command) {
        let mut aborted = u64::from(matches!(cause, Command::Wait { .. }));
        self.fetched.retain(|fetched| {
            let is_wait = matches!(fetched.command, Command::Wait { .. });
            aborted = aborted.saturating_add(u64::from(is_wait));
            !is_wait
        });
        self.counters.waits_aborted = self.counters.waits_aborted.saturating_add(aborted);
        self.fsts |= FSTS_ITE;
        self.fault_event();
    }

    fn carry_out(&mut self, world: &mut World, fabric: &mut Fabric, command: Command) {
        match command {
            Command::Wait { .. } => self.complete_wait(world, command),
            Command::Context { .. }
            | Command::Iotlb { .. }
            | Command::DeviceTlb { .. }
            | Command::Interrupt => {
                self.log.push(command);
                // Any invalidation lets pending host writes through first.
                world.ram.flush_buffer();
                self.invalidate(world, fabric, command);
            }
        }
    }

    fn complete_wait(&mut self, world: &mut World, command: Command) {
        let Command::Wait { status, interrupt, .. } = command else {
            return;
        };
        self.log.push(command);
        self.counters.waits = self.counters.waits.saturating_add(1);
        if let Some((address, data)) = status {
            // A status address outside RAM is written nowhere.
            world.ram.write_bytes(address & !3, &data.to_le_bytes());
        }
        if interrupt {
            self.completion_event();
        }
    }
}
