//! Whole lives of a handoff, written down: the two pure state machines against each
//! other, without sockets, threads or clocks. Each line of a transcript is one
//! event and what it led to; reading one is the quickest way to learn the protocol.

use std::time::{Duration, Instant};

use baton_kv_transfer::codec::Scope;
use baton_kv_transfer::part::PartRange;
use baton_kv_transfer::receiver::parts::PartTable;
use baton_kv_transfer::receiver::state::{LaneSerial, Layout, Limits, Placement, ReceiverState};
use baton_kv_transfer::receiver::{BlockGrant, GroupGrant, Protections};
use baton_kv_transfer::sender::SourceBlock;
use baton_kv_transfer::sender::state::{Limits as SendLimits, NextFrame, SenderState};
use baton_kv_transfer::{SessionId, Ticket};
use baton_proto::kv_layout::ByteExtent;
use baton_proto::{Attempt, Epoch};
use bytes::Bytes;

/// Two layers of three blocks; two blocks fit one frame.
const LAYERS: u32 = 2;
const BLOCKS: u32 = 3;
const PART_BYTES: u32 = 128 << 10;

struct World {
    start: Instant,
    now: Instant,
    scope: Scope,
    session: SessionId,
    lane: LaneSerial,
    sender: SenderState,
    receiver: ReceiverState,
    log: String,
}

impl World {
    fn new() -> Self {
        let start = Instant::now();
        let extent = ByteExtent {
            offset: 0,
            len: PART_BYTES,
            region: 0,
        };
        let block = |ordinal| BlockGrant {
            ordinal,
            layers: vec![extent; LAYERS as usize],
        };
        let parts = PartTable::new(&[GroupGrant {
            group: 0,
            layers: (0..LAYERS).collect(),
            blocks: (0..BLOCKS).map(block).collect(),
        }])
        .unwrap();
        let limits = Limits {
            resume_grace: Duration::from_millis(1500),
            corrupt_frames_max: 1,
            protections: Protections::ALL,
        };
        let sending = SendLimits {
            queue_parts_max: 100,
            queue_bytes_max: 1 << 30,
            in_flight_bytes_max: 1 << 30,
            in_flight_parts_max: 100,
            reconnect_max: Duration::from_secs(2),
        };
        let (epoch, attempt) = (Epoch(1), Attempt(1));
        let deadline = Duration::from_secs(10);
        Self {
            start,
            now: start,
            scope: Scope {
                ticket: Ticket(7),
                epoch,
                attempt,
            },
            session: SessionId(1),
            lane: LaneSerial(0),
            sender: SenderState::new(sending, start, deadline),
            receiver: ReceiverState::new(epoch, attempt, parts, limits, start, deadline),
            log: String::new(),
        }
    }

    fn line(&mut self, text: String) {
        let at = self.now.duration_since(self.start).as_millis();
        let (p, d) = (self.sender.phase().clone(), self.receiver.phase().clone());
        self.log += &format!("{at:>5} ms  {text:<58} P {p:?}, D {d:?}\n");
    }

    fn wait(&mut self, ms: u64) {
        self.now += Duration::from_millis(ms);
    }

    fn push(&mut self, layer: u32) {
        let extent = ByteExtent {
            offset: 0,
            len: PART_BYTES,
            region: 0,
        };
        let blocks: Vec<_> = (0..BLOCKS)
            .map(|ordinal| SourceBlock { ordinal, extent })
            .collect();
        self.sender.push(0, layer, &blocks).unwrap();
        self.line(format!("P pushes layer {layer}"));
    }

    fn connect(&mut self) {
        self.lane.0 += 1;
        self.sender.connected();
        assert!(self.sender.open_to_send(self.now));
        match self
            .receiver
            .attach(self.lane, self.session, self.scope, Layout::Same)
        {
            Ok(attached) => {
                let missing = ranges(&attached.missing.ranges);
                self.sender.opened(attached.missing, self.now);
                self.line(format!(
                    "P opens on lane {}; D lacks {missing}",
                    self.lane.0
                ));
            }
            Err(refusal) => {
                self.sender.refused(refusal);
                self.line(format!(
                    "P opens on lane {}; D refuses: {refusal}",
                    self.lane.0
                ));
            }
        }
    }

    /// One data frame; `arrives` as `intact`, or not at all.
    fn frame(&mut self, arrives: Option<bool>) {
        let NextFrame::Frame(plan) = self.sender.next_frame(u64::MAX, self.now) else {
            return self.line("P has nothing to send".to_owned());
        };
        let crcs: Vec<u32> = plan
            .range
            .keys()
            .map(|key| key.layer * 10 + key.ordinal)
            .collect();
        self.sender.checksums(plan.range, &crcs);
        let what = ranges(&[plan.range]);
        let Some(intact) = arrives else {
            return self.line(format!("P sends {what}; it is lost"));
        };
        let placement = self
            .receiver
            .place(self.lane, self.scope, plan.range, plan.bytes as u32);
        let Placement::Blocks(numbers) = placement else {
            return self.line(format!("P sends {what}; D reads it into {placement:?}"));
        };
        let arrival = self
            .receiver
            .arrived(self.lane, numbers, &crcs, intact, self.now);
        if format!("{arrival:?}") == "Corrupt" {
            self.sender.damaged(plan.range);
        }
        self.line(format!("P sends {what}; D: {arrival:?}"));
    }

    fn ask_commit(&mut self) {
        self.sender.commit(Bytes::from_static(b"first token"));
        self.line("the worker commits".to_owned());
    }

    /// The commit frame; its answer comes back if `answered`.
    fn commit(&mut self, answered: bool) {
        use baton_kv_transfer::receiver::state::CommitAnswer;
        let Some(plan) = self.sender.next_commit(self.now) else {
            return self.line("P may not commit yet".to_owned());
        };
        let answer =
            self.receiver
                .commit(self.lane, self.session, self.scope, plan.root, plan.parts);
        let text = match &answer {
            CommitAnswer::Missing(missing) => format!("still lacks {}", ranges(&missing.ranges)),
            other => format!("{other:?}"),
        };
        if !answered {
            return self.line(format!("P sends the commit; D: {text}, unheard"));
        }
        match answer {
            CommitAnswer::Committed | CommitAnswer::Again => drop(self.sender.committed()),
            CommitAnswer::Missing(missing) => self.sender.missing(&missing),
            CommitAnswer::Refused { refusal, .. } => drop(self.sender.refused(refusal)),
        }
        self.line(format!("P sends the commit; D: {text}"));
    }

    fn lane_breaks(&mut self) {
        self.sender.lane_lost(self.now);
        self.receiver.lane_lost(self.lane, self.now);
        self.line(format!("lane {} breaks", self.lane.0));
    }

    fn tick(&mut self) {
        self.sender.tick(self.now);
        self.receiver.tick(self.now);
        self.line("time passes".to_owned());
    }

    fn check(self, expected: &str) {
        let expected: String = expected
            .trim()
            .lines()
            .map(|line| format!("{}\n", line.trim()))
            .collect();
        let log: String = self
            .log
            .lines()
            .map(|line| format!("{}\n", line.trim()))
            .collect();
        assert!(log == expected, "the transcript is now:\n{}", self.log);
    }
}

fn ranges(ranges: &[PartRange]) -> String {
    let range = |range: &PartRange| {
        format!(
            "L{}[{}..{}]",
            range.layer,
            range.first,
            range.first + range.count
        )
    };
    if ranges.is_empty() {
        return "nothing".to_owned();
    }
    ranges.iter().map(range).collect::<Vec<_>>().join(" ")
}

#[test]
fn layers_travel_while_the_next_ones_compute() {
    let mut world = World::new();
    world.push(0);
    world.connect();
    world.frame(Some(true));
    world.frame(Some(true));
    world.frame(Some(true));
    world.wait(20);
    world.push(1);
    world.ask_commit();
    world.commit(true);
    world.frame(Some(true));
    world.frame(Some(true));
    world.commit(true);
    world.check(
        "
    0 ms  P pushes layer 0                                           P Open, D Granted
    0 ms  P opens on lane 1; D lacks L0[0..3] L1[0..3]               P Sending, D Receiving
    0 ms  P sends L0[0..2]; D: Stored                                P Sending, D Receiving
    0 ms  P sends L0[2..3]; D: Stored                                P Sending, D Receiving
    0 ms  P has nothing to send                                      P Sending, D Receiving
   20 ms  P pushes layer 1                                           P Sending, D Receiving
   20 ms  the worker commits                                         P Sending, D Receiving
   20 ms  P may not commit yet                                       P Sending, D Receiving
   20 ms  P sends L1[0..2]; D: Stored                                P Sending, D Receiving
   20 ms  P sends L1[2..3]; D: Stored                                P Sending, D Receiving
   20 ms  P sends the commit; D: Committed                           P Acked, D Ended(Committed)
",
    );
}

#[test]
fn lost_and_damaged_frames_and_a_broken_lane_cost_only_what_is_missing() {
    let mut world = World::new();
    world.push(0);
    world.push(1);
    world.ask_commit();
    world.connect();
    world.frame(None);
    world.frame(Some(false));
    world.frame(Some(true));
    world.wait(5);
    world.lane_breaks();
    world.frame(Some(true));
    world.wait(10);
    world.connect();
    world.frame(Some(true));
    world.frame(None);
    world.frame(Some(true));
    world.commit(true);
    world.frame(Some(true));
    world.commit(false);
    world.lane_breaks();
    world.wait(10);
    world.connect();
    world.commit(true);
    world.check(
        "
    0 ms  P pushes layer 0                                           P Open, D Granted
    0 ms  P pushes layer 1                                           P Open, D Granted
    0 ms  the worker commits                                         P Open, D Granted
    0 ms  P opens on lane 1; D lacks L0[0..3] L1[0..3]               P Sending, D Receiving
    0 ms  P sends L0[0..2]; it is lost                               P Sending, D Receiving
    0 ms  P sends L0[2..3]; D: Corrupt                               P Sending, D Receiving
    0 ms  P sends L1[0..2]; D: Stored                                P Sending, D Receiving
    5 ms  lane 1 breaks                                              P Sending, D Receiving
    5 ms  P has nothing to send                                      P Sending, D Receiving
   15 ms  P opens on lane 2; D lacks L0[0..3] L1[2..3]               P Sending, D Receiving
   15 ms  P sends L0[0..2]; D: Stored                                P Sending, D Receiving
   15 ms  P sends L0[2..3]; it is lost                               P Sending, D Receiving
   15 ms  P sends L1[2..3]; D: Stored                                P Sending, D Receiving
   15 ms  P sends the commit; D: still lacks L0[2..3]                P Sending, D Receiving
   15 ms  P sends L0[2..3]; D: Stored                                P Sending, D Receiving
   15 ms  P sends the commit; D: Committed, unheard                  P CommitSent, D Ended(Committed)
   15 ms  lane 2 breaks                                              P Sending, D Ended(Committed)
   25 ms  P opens on lane 3; D lacks nothing                         P Sending, D Ended(Committed)
   25 ms  P sends the commit; D: Again                               P Acked, D Ended(Committed)
",
    );
}

#[test]
fn a_fenced_attempt_writes_nothing_more_and_is_told_at_its_next_word() {
    let mut world = World::new();
    world.push(0);
    world.push(1);
    world.connect();
    world.frame(Some(true));
    world.receiver.fence();
    world.line("the router gives the prefill to another worker".to_owned());
    world.frame(Some(true));
    world.lane_breaks();
    world.connect();
    let newer = world
        .receiver
        .regrant(Attempt(2), true, world.now, Duration::from_secs(10));
    world.receiver = newer.unwrap_or_else(|phase| panic!("{phase:?}"));
    let lacks = ranges(&world.receiver.parts().missing().ranges);
    world.line(format!("D grants attempt 2, which lacks {lacks}"));
    world.check(
        "
    0 ms  P pushes layer 0                                           P Open, D Granted
    0 ms  P pushes layer 1                                           P Open, D Granted
    0 ms  P opens on lane 1; D lacks L0[0..3] L1[0..3]               P Sending, D Receiving
    0 ms  P sends L0[0..2]; D: Stored                                P Sending, D Receiving
    0 ms  the router gives the prefill to another worker             P Sending, D Ended(Fenced)
    0 ms  P sends L0[2..3]; D reads it into Scratch                  P Sending, D Ended(Fenced)
    0 ms  lane 1 breaks                                              P Sending, D Ended(Fenced)
    0 ms  P opens on lane 2; D refuses: the attempt is fenced        P Aborted(Refused(Fenced)), D Ended(Fenced)
    0 ms  D grants attempt 2, which lacks L0[2..3] L1[0..3]          P Aborted(Refused(Fenced)), D Granted
",
    );
}

#[test]
fn damage_that_stays_and_peers_that_stay_away_end_both_sides_once() {
    let mut world = World::new();
    world.push(0);
    world.connect();
    world.frame(Some(false));
    world.frame(Some(false));
    world.frame(Some(false));
    world.wait(1);
    world.lane_breaks();
    world.wait(1999);
    world.tick();
    world.wait(1);
    world.tick();
    world.check(
        r#"
    0 ms  P pushes layer 0                                           P Open, D Granted
    0 ms  P opens on lane 1; D lacks L0[0..3] L1[0..3]               P Sending, D Receiving
    0 ms  P sends L0[0..2]; D: Corrupt                               P Sending, D Receiving
    0 ms  P sends L0[2..3]; D: Poisoned                              P Sending, D Ended(Aborted(Corrupt))
    0 ms  P sends L0[0..2]; D reads it into Scratch                  P Sending, D Ended(Aborted(Corrupt))
    1 ms  lane 1 breaks                                              P Sending, D Ended(Aborted(Corrupt))
 2000 ms  time passes                                                P Sending, D Ended(Aborted(Corrupt))
 2001 ms  time passes                                                P Aborted(PeerLost("no lane came up in time")), D Ended(Aborted(Corrupt))
"#,
    );
}

#[test]
fn a_lane_that_does_not_come_back_expires_the_grant_first_and_then_the_transfer() {
    let mut world = World::new();
    world.push(0);
    world.connect();
    world.frame(Some(true));
    world.lane_breaks();
    world.wait(1499);
    world.tick();
    world.wait(1);
    world.tick();
    world.wait(500);
    world.tick();
    world.check(
        r#"
    0 ms  P pushes layer 0                                           P Open, D Granted
    0 ms  P opens on lane 1; D lacks L0[0..3] L1[0..3]               P Sending, D Receiving
    0 ms  P sends L0[0..2]; D: Stored                                P Sending, D Receiving
    0 ms  lane 1 breaks                                              P Sending, D Receiving
 1499 ms  time passes                                                P Sending, D Receiving
 1500 ms  time passes                                                P Sending, D Ended(Expired(LaneLost))
 2000 ms  time passes                                                P Aborted(PeerLost("no lane came up in time")), D Ended(Expired(LaneLost))
"#,
    );
}
